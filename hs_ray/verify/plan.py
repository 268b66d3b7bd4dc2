"""The plan against itself and against what run.json says of it: parts, units, order, sources, masks, totals."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from hs_ray.errors import OutputError
from hs_ray.plan import read_unit
from hs_ray.plan.files import UNITS_KEY, part_path
from hs_ray.reader.run import run_spec
from hs_ray.reader.shard import READ_ERRORS
from hs_ray.schema import RUN_JSON, SAMPLES, CaptureSpec, Sample, unit_name
from hs_ray.storage import Storage, raise_outage
from hs_ray.verify.report import Log, Report, with_progress
from hs_ray.verify.run import fact

PART = re.compile(rf"{SAMPLES}/part-(\d{{5,}})\.parquet")


@dataclass
class Totals:
    """What run.json says of the plan, from its rows."""

    tokens: int = 0
    learned_tokens: int = 0
    longest_tokens: int = 0
    largest_unit_tokens: int = 0
    rows: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # by power of 2, as `length_histogram`
    full: int = 0  # samples of max_seq_len tokens: no other can have been truncated

    def add(self, sizes: np.ndarray, learned: int, spec: CaptureSpec, max_seq_len: Any) -> None:
        """sizes: tokens of each sample of a unit."""
        self.tokens += int(sizes.sum())
        self.learned_tokens += learned
        self.largest_unit_tokens = max(self.largest_unit_tokens, int(sizes.sum()))
        self.longest_tokens = max(self.longest_tokens, int(sizes.max(initial=0)))
        self.rows += sum(len(spec.pieces(size)) for size in sizes.tolist())
        self.lengths.update((2 ** np.ceil(np.log2(sizes)).astype(np.int64)).tolist())
        self.full += int((sizes == max_seq_len).sum()) if isinstance(max_seq_len, int) else len(sizes)


@dataclass
class Plan:
    """What is kept of the plan, which is read a unit at a time."""

    lines: Counter[tuple[str, int]] = field(default_factory=Counter)  # how often each (source, line) is in it
    units: set[int] = field(default_factory=set)  # those that can be read
    totals: Totals = field(default_factory=Totals)


def check_plan(storage: Storage, run: dict[str, Any], report: Report, log: Log | None = None) -> Plan:
    plan, ids, told = Plan(), Counter[str](), run["plan"]
    units, per_file = told["units"], told["units_per_file"]
    if not 0 <= units <= told["samples"] or per_file < 1:
        detail = (
            f"plan has {units} units, {per_file} in a file, and {told['samples']} samples: one or more in each unit"
        )
        report.add("plan", RUN_JSON, detail)
    if per_file < 1:  # no unit can be found
        return plan
    rows = _Rows(run, report)
    parts = _parts(storage, units, per_file, report)
    for part in with_progress(parts, "files of the plan", len(parts), report, log):
        first = part * per_file
        here = range(first, min(first + per_file, units))
        for unit in _check_part(storage, part_path(first, per_file), here, report):
            try:
                samples = read_unit(storage, unit, per_file)
                rows.add(unit, samples, plan.totals)
            except OutputError as error:
                report.add("plan", SAMPLES, str(error))
                continue
            plan.units.add(unit)
            plan.lines.update((sample.source, sample.line) for sample in samples)
            ids.update(sample.sample_id for sample in samples)
    _check_lines(told["samples"], ids, plan.lines, report)
    if len(plan.units) == units:
        _check_totals(run, plan.totals, report)
    return plan


def _check_lines(samples: int, ids: Counter[str], lines: Counter[tuple[str, int]], report: Report) -> None:
    if lines.total() != samples:
        report.add("plan", SAMPLES, f"holds {lines.total()} samples, {RUN_JSON} says {samples}")
    for what, counter in (("sample_id", ids), ("source and line", lines)):
        twice = [key for key, number in counter.items() if number > 1]
        if twice:
            report.add(
                "plan", SAMPLES, f"{len(twice)} values of {what} are there more than once, the first is {twice[0]!r}"
            )


def _parts(storage: Storage, units: int, per_file: int, report: Report) -> list[int]:
    """The numbers of those files that should be there and are. No loop over units: run.json may say any number."""
    number = -(-units // per_file)
    found = []
    for path in [info.path for info in storage.list(SAMPLES)]:
        match = PART.fullmatch(path)
        if match and int(match[1]) < number and part_path(int(match[1]), 1) == path:
            found.append(int(match[1]))
        else:
            report.add("plan", path, f"no file of the plan, which has {units} units, {per_file} in a file")
    if len(found) < number:
        there = set(found)
        first = next(part for part in range(number) if part not in there)
        detail = f"missing; {number - len(found)} of the plan's {number} files are"
        report.add("plan", part_path(first, 1), detail)
    return sorted(found)


def _check_part(storage: Storage, path: str, units: range, report: Report) -> range:
    """A row group for each of its units, which is what their number says; the same in the file's own list of them.

    Returns the units that it has; one whose rows cannot be read is told when it is read whole.
    """
    try:
        with storage.open(path) as file:
            parquet = pq.ParquetFile(file)
            listed = (parquet.metadata.metadata or {}).get(UNITS_KEY.encode())
            groups = parquet.num_row_groups
            if groups != len(units):
                report.add("plan", path, f"{groups} row groups, it should have those of {len(units)} units")
                units = units[:groups]
            rows = [parquet.metadata.row_group(group).num_rows for group in range(len(units))]
            _check_units(parquet, path, units, report)
    except READ_ERRORS as error:
        raise_outage(error)
        report.add("plan", path, f"cannot be read ({error!r:.200})")
        return range(0)
    try:
        counts = None if listed is None else [entry[:2] for entry in json.loads(listed)]
    except (ValueError, TypeError, LookupError):
        counts = []
    if counts not in (None, [[unit, number] for unit, number in zip(units, rows, strict=True)]):
        report.add("plan", path, f"its entry {UNITS_KEY} is not what its rows are: {counts!r:.120}")
    return units


def _check_units(parquet: pq.ParquetFile, path: str, units: range, report: Report) -> None:
    for group, unit in enumerate(units):
        try:
            found = set(parquet.read_row_group(group, columns=["unit"]).column(0).to_pylist())
        except READ_ERRORS as error:  # damage is told when the unit is read whole
            raise_outage(error)
            continue
        if found != {unit}:
            report.add("plan", path, f"the samples of {unit_name(unit)} have the units {sorted(found, key=str)}")


class _Rows:
    """Takes the units one after the other."""

    def __init__(self, run: dict[str, Any], report: Report):
        sources = run.get("sources")  # older outputs name none
        known = [fact(source, "source") for source in sources] if isinstance(sources, list) else []
        self._place = {str(source): number for number, source in enumerate(known)}
        self._spec, self._max_seq_len = run_spec(run), fact(run, "config.max_seq_len")
        self._per_file: int = run["plan"]["units_per_file"]
        self._last: tuple[int, int] = (-1, -1)
        self._report = report

    def add(self, unit: int, samples: Sequence[Sample], totals: Totals) -> None:
        masks = [sample.loss_mask for sample in samples]
        sizes = np.array([sample.num_tokens for sample in samples], np.int64)
        if not len(sizes) or sizes.min() < 1:
            self._problem(unit, "has no samples, or one without tokens")
            return
        totals.add(sizes, sum(int(mask.sum(dtype=np.int64)) for mask in masks), self._spec, self._max_seq_len)
        if [len(mask) for mask in masks] != sizes.tolist():
            self._problem(unit, "has samples with more or fewer loss_mask values than tokens")
        elif max(int(mask.max()) for mask in masks) > 1:
            self._problem(unit, "loss_mask has other values than 0 and 1")
        if unknown := {sample.source for sample in samples} - self._place.keys() if self._place else set():
            self._problem(unit, f"{min(unknown)!r} is none of the sources that {RUN_JSON} names")
        for sample in samples:
            place = self._place.get(sample.source, 0), sample.line
            if place <= self._last:
                self._problem(unit, f"{sample.source} line {sample.line} is not after the sample before it")
                self._last = place
                return
            self._last = place

    def _problem(self, unit: int, detail: str) -> None:
        self._report.add("plan", part_path(unit, self._per_file), f"{unit_name(unit)}: {detail}")


def _check_totals(run: dict[str, Any], found: Totals, report: Report) -> None:
    """An older run.json has fewer of them."""
    told = run["plan"]
    names = ("tokens", "learned_tokens", "longest_tokens", "largest_unit_tokens", "rows")
    wanted: dict[str, Any] = {name: getattr(found, name) for name in names}
    wanted["length_histogram"] = [list(item) for item in sorted(found.lengths.items())]
    wanted["state_bytes"] = found.tokens * run_spec(run).bytes_per_token
    for name, value in wanted.items():
        if told.get(name, value) != value:
            report.add("plan", RUN_JSON, f"plan.{name} is {told[name]!r:.200}, the plan's rows give {value!r:.200}")
    longest, truncated = fact(run, "config.max_seq_len"), told.get("truncated", 0)
    if isinstance(longest, int) and found.longest_tokens > longest:
        report.add("plan", RUN_JSON, f"config.max_seq_len is {longest}, a sample has {found.longest_tokens} tokens")
    most = 0 if fact(run, "config.on_too_long") == "reject" else found.full
    if type(truncated) is not int or not 0 <= truncated <= most:
        detail = f"plan.truncated is {truncated!r:.80}, at most {most} samples can have been"
        report.add("plan", RUN_JSON, detail)
