"""What an output says about its run. Cheap whatever its size: run.json, markers, the first rejects, the history."""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow.parquet as pq

from hs_ray.errors import OutputError
from hs_ray.manifest import read_markers
from hs_ray.plan import PlanSummary, load_run, load_summary
from hs_ray.schema import MANIFEST, PROGRESS, REJECTED, RUN_JSON, ColumnStats, Marker, Reject
from hs_ray.storage import Storage

EXAMPLES = 3  # rejects shown of each code
SLOWEST = 5
BINS = 120  # points of a chart
LOOKED_AT = 50  # row groups of rejects that are searched for examples


@dataclass(frozen=True)
class Engine:
    name: str
    node: str
    units: int
    tokens: int
    busy_s: float  # 0 where the history does not know


@dataclass(frozen=True)
class Span:
    """Between two points of the history: seconds of driver time from the first start, whatever lay between drivers."""

    start: float
    end: float
    rate: float  # tokens/s
    busy: float  # share of the time that the engines had work, 0 to 1
    engines: float  # up


@dataclass(frozen=True)
class Facts:
    root: str
    run: dict[str, Any]
    plan: PlanSummary
    complete: bool
    units: int
    samples: int
    tokens: int
    rows: int
    bytes: int
    shard_bytes: list[int]
    failed: list[Reject]
    columns: dict[str, ColumnStats]
    engines: list[Engine]
    slowest: list[Marker]
    examples: dict[str, list[Reject]]
    spans: list[Span] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)  # driver seconds at which another driver went on

    @property
    def seconds(self) -> float:
        """Driver time that the history covers."""
        return self.spans[-1].end if self.spans else 0.0

    @property
    def rejects_by_code(self) -> dict[str, int]:
        """Lines without states, the samples that failed among them, most frequent code first."""
        counts = Counter(self.plan.rejects_by_code) + Counter(reject.code for reject in self.failed)
        return dict(counts.most_common())


def collect(storage: Storage, markers: Mapping[int, Marker] | None = None) -> Facts:
    """Everything the page shows. markers: where they are known already. Raises OutputError where there is no run."""
    run = load_run(storage)
    if run is None:
        raise OutputError(f"output.path = {storage.root}: no {RUN_JSON} there, so this is not an output of hs_ray")
    if markers is None:
        markers = read_markers(storage, run["fingerprint"])
    plan, histories = load_summary(run), _histories(storage)
    spans, restarts = _spans(histories)
    columns: dict[str, ColumnStats] = {}
    for marker in markers.values():
        for name, stats in marker.columns.items():
            columns[name] = columns.get(name, ColumnStats()) + stats
    failed = [reject for marker in markers.values() for reject in marker.failed]
    return Facts(
        root=storage.root,
        run=run,
        plan=plan,
        complete=_complete(storage),
        units=len(markers),
        samples=sum(marker.samples for marker in markers.values()),
        tokens=sum(marker.tokens for marker in markers.values()),
        rows=sum(marker.rows for marker in markers.values()),
        bytes=sum(marker.bytes for marker in markers.values()),
        shard_bytes=sorted(marker.bytes for marker in markers.values() if marker.shard),
        failed=failed,
        columns={name: columns[name] for name in run["spec"]["columns"] if name in columns},
        engines=_engines(markers.values(), histories),
        slowest=heapq.nlargest(SLOWEST, markers.values(), key=lambda marker: marker.seconds),
        examples=_examples(storage, failed, plan.rejects_by_code),
        spans=spans,
        restarts=restarts,
    )


def _complete(storage: Storage) -> bool:
    return storage.exists(MANIFEST) and bool(json.loads(storage.read_bytes(MANIFEST)).get("complete"))


def _histories(storage: Storage) -> list[dict[str, Any]]:
    paths = [info.path for info in storage.list(PROGRESS) if info.path.endswith(".json")]
    return sorted((json.loads(content) for content in storage.read_many(paths)), key=lambda history: history["epoch"])


def _engines(markers: Iterable[Marker], histories: list[dict[str, Any]]) -> list[Engine]:
    units, tokens = Counter[str](), Counter[str]()
    for marker in markers:
        units[marker.engine] += 1
        tokens[marker.engine] += marker.tokens
    seen = {name: engine for history in histories for name, engine in history["by_engine"].items()}
    return [
        Engine(
            name, seen.get(name, {}).get("node", ""), units[name], tokens[name], seen.get(name, {}).get("busy_s", 0.0)
        )
        for name in sorted(units.keys() | seen.keys())
        if name
    ]


def _spans(histories: list[dict[str, Any]]) -> tuple[list[Span], list[float]]:
    """Points -> at most about BINS spans over driver time; points are running totals, so thinning keeps rates right."""
    spans: list[Span] = []
    restarts = []
    points = sum(len(history["points"]) for history in histories)
    step = max(1, points // BINS)
    offset = 0.0
    for history in histories:
        kept = history["points"][::step]
        if history["points"] and kept[-1] != history["points"][-1]:
            kept.append(history["points"][-1])
        if len(kept) < 2:
            continue
        if spans:
            restarts.append(offset)
        begin = kept[0][0]
        for (t0, tokens0, busy0, _), (t1, tokens1, busy1, up) in pairwise(kept):
            if t1 > t0:
                took = t1 - t0
                share = min(1.0, max(0.0, busy1 - busy0) / took / max(history["engines"], 1))
                rate = max(0.0, tokens1 - tokens0) / took
                spans.append(Span(offset + t0 - begin, offset + t1 - begin, rate, share, up))
        offset += kept[-1][0] - begin
    return spans, restarts


def _examples(storage: Storage, failed: list[Reject], codes: Mapping[str, int]) -> dict[str, list[Reject]]:
    """The first few rejects of each code."""
    found: dict[str, list[Reject]] = {}
    for reject in failed:
        found.setdefault(reject.code, []).append(reject)
    if codes and storage.exists(REJECTED):
        with storage.open(REJECTED) as file:
            parquet = pq.ParquetFile(file)
            for group in range(min(parquet.num_row_groups, LOOKED_AT)):
                for row in parquet.read_row_group(group).to_pylist():
                    found.setdefault(row["code"], []).append(Reject(**row))
                found = {code: rejects[:EXAMPLES] for code, rejects in found.items()}
                if all(len(found.get(code, [])) >= min(EXAMPLES, count) for code, count in codes.items()):
                    break
    return {code: rejects[:EXAMPLES] for code, rejects in found.items()}
