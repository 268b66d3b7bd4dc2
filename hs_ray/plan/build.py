"""Lines -> units, written to the output with their tokens, so that an actor never tokenizes again.

One pass over the tables of `inputs.iter_chunk`, in order. What is held is one unit and a 16-byte digest of each id, so
the input may be far larger than memory. The result depends on the lines alone: not on chunks, workers or the order of
files.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from hs_ray.inputs.read import BLANK, REJECT, SAMPLE, SOURCE_KEY
from hs_ray.plan.files import PLAN, UNITS_PER_FILE, RejectFile, UnitFiles
from hs_ray.plan.resolved import ResolvedJob
from hs_ray.schema import MAX_CELL_BYTES, SAMPLES, Reject
from hs_ray.storage import OnWait, Storage

EXAMPLES = 3


@dataclass
class PlanSummary:
    """What a plan holds. lines = samples + rejected + blank."""

    lines: int = 0
    blank: int = 0
    samples: int = 0
    tokens: int = 0
    learned_tokens: int = 0  # with loss_mask 1
    truncated: int = 0
    rejected: int = 0
    rejects_by_code: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)  # the first rejects
    units: int = 0
    units_per_file: int = UNITS_PER_FILE
    longest_tokens: int = 0
    largest_unit_tokens: int = 0  # 0: a plan of an earlier release, which did not count it
    length_histogram: list[list[int]] = field(default_factory=list)  # [most tokens (a power of 2), samples]
    rows: int = 0  # of the shards: samples, and pieces of very long ones
    state_bytes: int = 0  # of all states, uncompressed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_plan(
    storage: Storage | None, tables: Iterable[pa.Table], resolved: ResolvedJob, on_wait: OnWait | None = None
) -> PlanSummary:
    """Write `_run/samples/` and `_run/rejected.parquet` from the tables of all chunks, in the chunks' order.

    A unit ends at the sample border that is nearest to a multiple of `output.shard_bytes` of states.
    storage None: count, and write nothing (a dry run). A full disk is waited for; on_wait: called meanwhile.
    """
    with contextlib.ExitStack() as stack:
        units = stack.enter_context(UnitFiles(storage, resolved.unit_tokens, on_wait))
        rejects = stack.enter_context(RejectFile(storage, on_wait))
        plan = _Planner(resolved, units, rejects)
        for table in tables:
            plan.add(table)
            if plan.lines_left == 0:
                break
        units.finish()
        rejects.finish()
    if storage is not None:
        _remove_others(storage, units.paths)
    plan.summary.units, plan.summary.largest_unit_tokens = units.unit + 1, units.largest_tokens
    plan.summary.rejects_by_code = dict(sorted(plan.codes.items()))
    plan.summary.length_histogram = [[2**i, int(n)] for i, n in enumerate(plan.lengths) if n]
    return plan.summary


def _remove_others(storage: Storage, paths: set[str]) -> None:
    """Files of an earlier plan that was cut off: run.json is written last."""
    for info in storage.list(SAMPLES):
        if info.path not in paths:
            storage.remove(info.path)


class _Planner:
    """Absolute lines, ids, duplicates, counts."""

    def __init__(self, resolved: ResolvedJob, units: UnitFiles, rejects: RejectFile):
        self.spec = resolved.spec
        self.lines_left = -1 if resolved.job.input.limit is None else resolved.job.input.limit  # -1: all
        self.units, self.rejects = units, rejects
        self.summary = PlanSummary()
        self.codes: Counter[str] = Counter()
        self.lengths = np.zeros(32, np.int64)
        self._seen: set[bytes] = set()
        self._source, self._line = "", 0

    def add(self, table: pa.Table) -> None:
        source = table.schema.metadata[SOURCE_KEY].decode()
        if source != self._source:
            self._source, self._line = source, 0
        if self.lines_left >= 0:
            table = table.slice(0, self.lines_left)
            self.lines_left -= len(table)
        kinds = table["kind"].to_numpy()
        lines = self._line + np.arange(len(table), dtype=np.int64)
        self._line += len(table)
        self.summary.lines += len(table)
        self.summary.blank += int((kinds == BLANK).sum())
        duplicate, ids = self._identify(table, kinds == SAMPLE, lines)
        self._reject(table, lines, duplicate, kinds == REJECT)
        chosen = (kinds == SAMPLE) & ~duplicate
        if chosen.any():
            self._take(
                table.filter(pa.array(chosen)), pa.array(ids, pa.string()).filter(pa.array(chosen)), lines[chosen]
            )

    def _identify(self, table: pa.Table, samples: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, list[str | None]]:
        """(which lines repeat an earlier sample's id, the ids: given, or made from source and line)."""
        duplicate = np.zeros(len(table), bool)
        ids: list[str | None] = table["sample_id"].to_pylist()
        for i in np.flatnonzero(samples).tolist():
            name = ids[i]
            if name is None:
                name = ids[i] = hashlib.sha256(f"{self._source}\0{lines[i]}".encode()).hexdigest()[:20]
            digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
            duplicate[i] = digest in self._seen
            self._seen.add(digest)
        return duplicate, ids

    def _reject(self, table: pa.Table, lines: np.ndarray, duplicate: np.ndarray, rejected: np.ndarray) -> None:
        for i in np.flatnonzero(duplicate | rejected).tolist():
            name = table["sample_id"][i].as_py()
            if duplicate[i]:
                reason = ("duplicate_id", f"an earlier line has the id {name!r}")
            else:
                reason = (table["code"][i].as_py(), table["message"][i].as_py())
            reject = Reject(name, self._source, int(lines[i]), *reason)
            self.rejects.add(reject)
            self.codes[reject.code] += 1
            self.summary.rejected += 1
            if len(self.summary.examples) < EXAMPLES:
                self.summary.examples.append(asdict(reject))

    def _take(self, samples: pa.Table, ids: pa.Array, lines: np.ndarray) -> None:
        summary = self.summary
        sizes = samples["input_ids"].combine_chunks().value_lengths().to_numpy().astype(np.int64)
        piece = max(1, MAX_CELL_BYTES // self.spec.row_bytes)  # as CaptureSpec.pieces
        summary.samples += len(samples)
        summary.tokens += int(sizes.sum())
        summary.learned_tokens += int(samples["loss_mask"].combine_chunks().flatten().to_numpy().sum(dtype=np.int64))
        summary.truncated += int(samples["truncated"].to_numpy().sum())
        summary.longest_tokens = max(summary.longest_tokens, int(sizes.max()))
        summary.rows += int((-(-sizes // piece)).sum())
        summary.state_bytes = summary.tokens * self.spec.bytes_per_token
        self.lengths += np.bincount(np.ceil(np.log2(sizes)).astype(np.int64), minlength=len(self.lengths))
        columns = [
            ids,
            pa.array([self._source] * len(samples)),
            pa.array(lines),
            samples["input_ids"],
            samples["loss_mask"],
        ]
        self.units.add(pa.table(columns, names=PLAN.names[:-1]), sizes)
