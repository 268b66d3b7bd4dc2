"""Every line of the input is accounted for once: a sample with states, a failed sample, a rejected line, or blank.

lines = samples + rejected + blank; samples = committed + failed; every line without states is in `_rejects/` once.
"""

import json
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import pyarrow.parquet as pq

from hs_ray.reader.shard import READ_ERRORS
from hs_ray.schema import DONE, MANIFEST, REJECTED, REJECTS, RUN_JSON, Marker, Reject, Sample, marker_path, unit_name
from hs_ray.storage import Storage, raise_outage
from hs_ray.verify.report import Report

Line = tuple[str | None, str, int, str]  # sample_id, source, line, code of a line without states
LINE_COLUMNS = ("sample_id", "source", "line", "code")
LINE_TYPES = ((str, type(None)), str, int, str)
TERMS = ("lines", "blank", "rejected", "samples")  # of the sum, in the plan and in the manifest's counts


def check_failed(marker: Marker, planned: Sequence[Sample], shard: bool, report: Report) -> None:
    """A unit's marker names as failed only samples of its unit, each once.

    shard: it is here, and the check of its rows says which planned ones are missing; else the numbers have to do.
    """
    path, unit = marker_path(marker.unit), unit_name(marker.unit)
    failed = Counter((reject.sample_id, reject.source, reject.line) for reject in marker.failed)
    samples = {(sample.sample_id, sample.source, sample.line) for sample in planned}
    for sample_id, source, line in failed.keys() - samples:
        detail = f"failed sample {sample_id!r} ({source} line {line}) is not in the plan of {unit}"
        report.add("conservation", path, detail)
    if max(failed.values(), default=1) > 1:
        report.add("conservation", path, f"sample {failed.most_common(1)[0][0][0]!r} is named as failed more than once")
    if not shard and marker.samples + len(marker.failed) != len(planned):
        detail = f"{len(planned)} samples planned, but {marker.samples} committed + {len(marker.failed)} failed"
        report.add("conservation", path, f"{unit}: {detail}")


def check_conservation(
    run: dict[str, Any], markers: dict[int, Marker], manifest: dict[str, Any] | None, report: Report
) -> None:
    """The sums. manifest: of a complete run; None for one that is not."""
    plan = run["plan"]
    if plan["lines"] != plan["samples"] + plan["rejected"] + plan["blank"]:
        parts = f"{plan['samples']} samples + {plan['rejected']} rejected + {plan['blank']} blank"
        report.add("conservation", RUN_JSON, f"{plan['lines']} lines, but {parts}")
    committed = sum(marker.samples for marker in markers.values())
    failed = sum(len(marker.failed) for marker in markers.values())
    report.count("failed", failed)
    report.count("rejected", plan["rejected"])
    if manifest is None:
        return
    if plan["samples"] != committed + failed:
        report.add(
            "conservation", DONE, f"{plan['samples']} samples planned, but {committed} committed + {failed} failed"
        )
    counts = manifest["counts"]
    wanted = {name: plan[name] for name in TERMS} | {"committed": committed, "failed": failed}
    wanted |= {name: sum(getattr(m, name) for m in markers.values()) for name in ("tokens", "rows", "bytes")}
    if "units" in counts:
        wanted["units"] = plan["units"]
    for name, value in wanted.items():
        if counts.get(name) != value or type(counts[name]) is not int:  # readers refuse 4.0
            report.add("conservation", MANIFEST, f"{name} is {counts.get(name)!r}, plan and markers give {value}")


def check_rejects(
    storage: Storage,
    run: dict[str, Any],
    markers: dict[int, Marker],
    manifest: dict[str, Any] | None,
    planned: Set[tuple[str, int]],
    report: Report,
) -> None:
    """The lines without states, one by one: what planning refused, what the markers name, what `_rejects/` lists.

    planned: (source, line) of every sample; manifest: of a complete run, before which there is no `_rejects/`.
    """
    rejected = _rejected(storage, run["plan"]["rejected"], report)
    if rejected is not None:
        _check_planned_codes(run, rejected, REJECTED, report)
    if manifest is None:
        return
    failed = [reject for marker in markers.values() for reject in marker.failed]
    listed = _listed(storage, report)
    lines = Counter((source, line) for _, source, line, _ in listed)
    number = run["plan"]["rejected"] + len(failed)
    if len(listed) != number or max(lines.values(), default=1) > 1:
        without = f"{run['plan']['rejected']} rejected + {len(failed)} failed"
        detail = f"{len(listed)} entries for {len(lines)} lines; without states are {without}"
        report.add("conservation", REJECTS, detail)
    both = (lines.keys() & planned) - {(reject.source, reject.line) for reject in failed}
    if both:
        detail = f"{len(both)} lines are listed though they are samples with states, the first is {min(both)}"
        report.add("conservation", REJECTS, detail)
    of_markers, of_list = Counter(_line(reject) for reject in failed), Counter(listed)
    if rejected is None:  # then the markers' half is all that is known
        rejected = list((of_list - of_markers).elements())
        _check_planned_codes(run, rejected, REJECTS, report)
    _compare_lists(of_markers + Counter(rejected), of_list, report)
    _check_codes(manifest, rejected, failed, report)


def _line(reject: Reject) -> Line:
    return reject.sample_id, reject.source, reject.line, reject.code


def _rejected(storage: Storage, number: int, report: Report) -> list[Line] | None:
    """What planning refused; None where that is not known. number: how many the plan says there are."""
    if not storage.exists(REJECTED):
        if number:
            detail = f"missing; the {number} lines that {RUN_JSON} says were rejected are in it alone"
            report.add("plan", REJECTED, detail)
        return None if number else []
    try:
        with storage.open(REJECTED) as file:
            rows = pq.ParquetFile(file, page_checksum_verification=True).read(columns=list(LINE_COLUMNS)).to_pylist()
        found = [_line_of(row) for row in rows]
    except (*READ_ERRORS, KeyError) as error:
        raise_outage(error)
        report.add("plan", REJECTED, f"cannot be read ({error}); {number} lines of the input are in it alone")
        return None
    if len(found) != number:
        report.add("plan", REJECTED, f"holds {len(found)} rejected lines, {RUN_JSON} says {number}")
    return found


def _listed(storage: Storage, report: Report) -> list[Line]:
    """What `_rejects/` lists."""
    files = [info.path for info in storage.list(REJECTS)]
    found = []
    for path, data in zip(files, storage.read_many(files), strict=True):
        for number, text in enumerate(data.splitlines()):
            try:
                if text.strip():
                    found.append(_line_of(json.loads(text)))
            except (ValueError, KeyError) as error:
                report.add("conservation", path, f"line {number} cannot be read ({error!r})")
    return found


def _line_of(entry: Any) -> Line:
    """Raises ValueError or KeyError for what does not name a line."""
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r:.80} is no object")
    sample_id, source, line, code = values = entry.get("sample_id"), *(entry[name] for name in LINE_COLUMNS[1:])
    for name, value, kind in zip(LINE_COLUMNS, values, LINE_TYPES, strict=True):
        if not isinstance(value, kind):  # type: ignore[arg-type]  # a type, or a tuple of types
            raise ValueError(f"{name} is {value!r:.80}")
    return sample_id, source, line, code


def _compare_lists(wanted: Counter[Line], listed: Counter[Line], report: Report) -> None:
    for found, what in (
        (wanted - listed, "lines without states are not listed"),
        (listed - wanted, "entries are of no line that was rejected or failed"),
    ):
        if found:
            first = dict(zip(LINE_COLUMNS, next(iter(found)), strict=True))
            report.add("conservation", REJECTS, f"{found.total()} {what}, the first is {first}")


def _check_planned_codes(run: dict[str, Any], rejected: list[Line], source: str, report: Report) -> None:
    """source: the file that `rejected` was read from."""
    by_code = Counter(code for _, _, _, code in rejected)
    told = run["plan"].get("rejects_by_code")
    if not _counts(told, by_code):
        report.add("conservation", RUN_JSON, f"plan.rejects_by_code is {told!r:.200}, {source} gives {dict(by_code)}")


def _check_codes(manifest: dict[str, Any], rejected: list[Line], failed: list[Reject], report: Report) -> None:
    """`rejects_by_code` counts what planning refused; the failed samples may be in it, too, or it may be absent."""
    told = manifest["counts"].get("rejects_by_code")
    by_code = Counter(code for _, _, _, code in rejected)
    both = by_code + Counter(reject.code for reject in failed)
    if not _counts(told, by_code, both):
        report.add("conservation", MANIFEST, f"rejects_by_code is {told!r:.200}, the plan gives {dict(by_code)}")


def _counts(told: Any, *found: Counter[str]) -> bool:
    """Whether `rejects_by_code` is one of these numbers, or absent; a code that it has 0 of is none."""
    return told is None or (isinstance(told, dict) and {code: n for code, n in told.items() if n} in found)
