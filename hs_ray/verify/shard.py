"""The audit of one shard: file, footer, rows against the plan, states against themselves and against the marker."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hs_ray.errors import HsRayError
from hs_ray.reader import FinalNorm
from hs_ray.reader.shard import READ_ERRORS, decode_state
from hs_ray.schema import (
    STATE_BYTES,
    ColumnStats,
    Marker,
    Sample,
    marker_path,
    state_checksum,
)
from hs_ray.storage import Storage, raise_outage
from hs_ray.verify.content import SampleProbe, probe_sample
from hs_ray.verify.footer import footer_fits
from hs_ray.verify.norm import LIMIT, norm_error
from hs_ray.verify.planned import SMALL, PlannedRows
from hs_ray.verify.report import Report
from hs_ray.verify.rows import measure, repeated_rows, stats_differ

AFTER = "final_post_norm"
EMBEDDINGS = "hidden_0"  # zeros and repeats are the model's own there


@dataclass
class ShardAudit:
    """What the audit of one shard hands on to the checks across shards."""

    report: Report = field(default_factory=Report)
    probes: list[SampleProbe] = field(default_factory=list)


def audit_shard(
    storage: Storage,
    run: dict[str, Any],
    columns: tuple[str, ...],
    marker: Marker,
    planned: list[Sample],
    norm: FinalNorm | None,
) -> ShardAudit:
    """All checks that need one shard alone.

    planned: the unit's samples that should be in it; norm: None where it cannot be applied.
    """
    audit = ShardAudit()
    path = str(marker.shard)
    try:
        parquet = _open(storage, marker, audit.report)
        if parquet is not None and footer_fits(parquet, path, run, columns, marker, audit.report):
            _Rows(parquet, path, run, columns, planned, norm, audit).check(marker)
    except HsRayError:  # the store, not the file
        raise
    except Exception as error:  # noqa: BLE001  damage can surface as anything, and must not hide the other shards' results
        raise_outage(error)
        audit.report.add("file", path, f"damaged, the check ended at {type(error).__name__}: {error}")
    return audit


def _open(storage: Storage, marker: Marker, report: Report) -> pq.ParquetFile | None:
    """The file that a marker names, whole: its size and sha256. None where it is no Parquet file."""
    path = str(marker.shard)
    try:
        data = _load(storage, path)
        if data.size != marker.bytes:
            report.add("size", path, f"{data.size} bytes, the marker says {marker.bytes}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != marker.sha256:
            report.add("checksum", path, f"sha256 is {digest[:16]}..., the marker says {marker.sha256[:16]}...")
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    except READ_ERRORS as error:
        raise_outage(error)
        report.add("file", path, f"not a readable Parquet file ({error})")
        return None


def _load(storage: Storage, path: str) -> pa.Buffer:
    if local := storage.local_path(path):
        return pa.memory_map(local).read_buffer()
    return pa.py_buffer(storage.read_bytes(path))


class _Rows:
    """One pass over the rows of a shard."""

    def __init__(
        self,
        parquet: pq.ParquetFile,
        path: str,
        run: dict[str, Any],
        columns: tuple[str, ...],
        planned: list[Sample],
        norm: FinalNorm | None,
        audit: ShardAudit,
    ):
        self.parquet, self.path, self.columns, self.planned, self.audit = parquet, path, columns, planned, audit
        self.norm, self.report = norm, audit.report
        self.hidden: int = run["spec"]["hidden_size"]
        self.last = f"hidden_{run['spec']['num_hidden_layers']}"
        self.vocab: int = run["model"]["vocab_size"]
        self.compression: str = run["config"]["output"]["compression"]
        self.stats = {name: ColumnStats() for name in columns}
        self.checksums: dict[str, dict[str, int]] = {}  # of each sample, by column

    def check(self, marker: Marker) -> None:
        rows = PlannedRows(self.planned, self.hidden, self.path, self.report)
        counts = {"rows": self.parquet.num_row_groups, "samples": 0, "tokens": 0}
        for number in range(self.parquet.num_row_groups):
            try:
                table = self.parquet.read_row_group(number, use_threads=False)
            except READ_ERRORS as error:
                raise_outage(error)
                self.report.add("file", self.path, f"row {number} cannot be read ({error})")
                continue
            row = self._small(number, table)
            if row is None:
                continue
            counts["samples"] += row["token_start"] == 0
            counts["tokens"] += row["num_tokens"]
            rows.add(number, row)
            states = self._states(number, row, table)
            self._against_norm(f"row {number}, sample {row['sample_id']!r}", states)
            if row["token_start"] == 0 and len(states) == len(self.columns):
                probe = probe_sample(row["sample_id"], self.path, row["input_ids"], states, self.last)
                self.audit.probes.append(probe)
        rows.check_coverage()
        self._against_checksums(marker)
        for name, found in counts.items():
            self.report.count(name, found)
            if found != getattr(marker, name):
                self.report.add(
                    "counts", self.path, f"{found} {name}, {marker_path(marker.unit)} says {getattr(marker, name)}"
                )
        for name in self.columns:
            recorded = marker.columns.get(name)
            different = "the marker has none" if recorded is None else stats_differ(self.stats[name], recorded)
            if different:
                self.report.add("statistics", self.path, f"column {name}: {different}")

    def _small(self, number: int, table: pa.Table) -> dict[str, Any] | None:
        """All but the states of a row, input_ids and loss_mask as arrays [S]; None if that is no row of the format."""
        row: dict[str, Any] = {name: table.column(name)[0].as_py() for name in SMALL}
        lists = {name: table.column(name)[0].values for name in ("input_ids", "loss_mask")}
        nulls = [name for name, value in row.items() if value is None]
        nulls += [name for name, values in lists.items() if values is None or values.null_count]
        lengths = {name: 0 if values is None else len(values) for name, values in lists.items()}
        if nulls:
            self.report.add("row", self.path, f"row {number}: a null in {', '.join(nulls)}")
            return None
        if not row["num_tokens"] > 0 or set(lengths.values()) != {row["num_tokens"]}:
            detail = f"num_tokens is {row['num_tokens']}, " + ", ".join(f"{n} {name}" for name, n in lengths.items())
            self.report.add("row", self.path, f"row {number}, sample {row['sample_id']!r}: {detail}")
            return None
        return row | {name: values.to_numpy() for name, values in lists.items()}

    def _states(self, number: int, row: dict[str, Any], table: pa.Table) -> dict[str, np.ndarray]:
        """The row's states by column, uint16 [S, H]; those that can be looked at."""
        where = f"row {number}, sample {row['sample_id']!r}"
        if not 0 <= row["input_ids"].min() <= row["input_ids"].max() < self.vocab:
            self.report.add("ids", self.path, f"{where}: token ids outside 0..{self.vocab - 1}")
        states = {}
        for name in self.columns:
            try:
                bits = decode_state(table, name, self.compression)
            except ValueError as error:
                self.report.add("width", self.path, f"{where}: {error}")
                continue
            expected = row["num_tokens"] * self.hidden
            if len(bits) != expected:
                needed = f"{row['num_tokens']} tokens * {self.hidden} * {STATE_BYTES} = {expected * STATE_BYTES}"
                detail = f"{len(bits) * STATE_BYTES} bytes; {needed}"
                self.report.add("width", self.path, f"{where}, column {name}: {detail}")
                continue
            states[name] = bits.reshape(row["num_tokens"], self.hidden)
            self._column(where, name, row["input_ids"], states[name])
            of_sample = self.checksums.setdefault(row["sample_id"], {})
            piece = state_checksum(states[name], row["token_start"])
            of_sample[name] = (of_sample.get(name, 0) + piece) % 2**64
        return states

    def _against_norm(self, where: str, states: dict[str, np.ndarray]) -> None:
        """Where the state before the final norm and the one after it were both kept, one is the norm of the other."""
        before = next((name for name in ("final_pre_norm", self.last) if name in states), None)
        if self.norm is None or before is None or AFTER not in states:
            return
        self.report.count("norms")
        token, difference = norm_error(self.norm, states[before], states[AFTER])
        if difference > LIMIT:
            detail = f"token {token}: {AFTER} is not the norm of {before}, it differs by {difference:.2g}"
            self.report.add("columns", self.path, f"{where}, {detail}, {LIMIT:g} allowed")

    def _against_checksums(self, marker: Marker) -> None:
        """Every bit is the one that the device computed, for this sample and this column.

        Except for channels that are exchanged within a token's row: the checksum is a sum over it.
        """
        missing = [name for name in self.checksums if len(marker.checksums.get(name, ())) != len(self.columns)]
        if missing:
            detail = f"{len(missing)} samples have no checksums of their {len(self.columns)} columns"
            self.report.add("bits", marker_path(marker.unit), f"{detail}, the first is {missing[0]!r}")
        without = set(missing)
        for sample_id, of_sample in self.checksums.items():
            if sample_id in without:
                continue
            recorded = dict(zip(self.columns, marker.checksums[sample_id], strict=True))
            for name, found in of_sample.items():
                self.report.count("checksums")
                if found != recorded[name]:
                    detail = "the bits are not those that the device computed"
                    self.report.add("bits", self.path, f"sample {sample_id!r}, column {name}: {detail}")

    def _column(self, where: str, name: str, input_ids: np.ndarray, bits: np.ndarray) -> None:
        found = measure(bits)
        self.stats[name] += found
        if found.nonfinite_rows:
            self.report.add(
                "nonfinite",
                self.path,
                f"{where}, column {name}: {found.nonfinite_rows} of {found.rows} tokens hold a NaN or an infinity",
            )
        if name == EMBEDDINGS:
            return
        if found.zero_rows:
            self.report.add(
                "zeros", self.path, f"{where}, column {name}: {found.zero_rows} of {found.rows} tokens are all zero"
            )
        repeated = repeated_rows(bits, input_ids)
        if repeated:
            self.report.add(
                "repeated",
                self.path,
                f"{where}, column {name}: the different tokens {repeated[0]} and {repeated[1]} have the same state",
            )
