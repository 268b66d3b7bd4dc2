"""`verify` without a second model: files, markers, plan, rows, states, conservation."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hs_ray.errors import OutputError, ShardError
from hs_ray.plan import read_unit
from hs_ray.reader.output import OUR_SHARD, find_shards, load_json, load_run, run_spec
from hs_ray.schema import DONE, MANIFEST, REJECTS, RUN_JSON, SAMPLES, SHARDS, Marker, marker_path, unit_name
from hs_ray.storage import PerNodeStorage, Storage
from hs_ray.verify.content import ContentChecks
from hs_ray.verify.report import Report
from hs_ray.verify.shard import ShardAudit, audit_shard


def verify_integrity(storage: Storage, incomplete: bool = False, workers: int | None = None) -> Report:
    """Check everything that can be checked without the model.

    Raises OutputError where there is no run to check, or an unfinished one without `incomplete`. Every other trouble
    is a problem in the report.
    """
    run = load_run(storage)
    storage = find_shards(storage, run)
    report = Report()
    manifest = _manifest(storage, report)
    if not (manifest and manifest.get("complete")) and not incomplete:
        raise OutputError(
            f"output.path = {storage.root}: the run is not complete; finish it, or check what is committed so far with "
            f"verify.incomplete=true"
        )
    markers = _markers(storage, report)
    if manifest and manifest.get("complete"):
        _against_manifest(manifest, markers, run, report)
    _files(storage, markers, bool(manifest), report)
    lines, readable = _plan(storage, run, report)
    _shards(storage, run, [m for m in markers.values() if m.unit in readable], report, workers)
    _conservation(storage, run, markers, manifest, lines, report)
    return report


def _manifest(storage: Storage, report: Report) -> dict[str, Any] | None:
    try:
        return load_json(storage, MANIFEST)
    except ShardError as error:
        report.add("manifest", MANIFEST, str(error))
        return {
            "complete": True,
            "counts": {},
            "shards": [],
        }  # damaged, so there was one: everything else is still checked


def _markers(storage: Storage, report: Report) -> dict[int, Marker]:
    """Every marker that can be read, by unit."""
    files = [info.path for info in storage.list(DONE)]
    markers = {}
    for path, data in zip(files, storage.read_many(files), strict=True):
        try:
            marker = Marker.from_json(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            report.add("marker", path, f"cannot be read ({error})")
            continue
        if path != marker_path(marker.unit):
            report.add("marker", path, f"is a marker of {unit_name(marker.unit)}")
            continue
        markers[marker.unit] = marker
    return dict(sorted(markers.items()))


def _against_manifest(
    manifest: dict[str, Any], markers: dict[int, Marker], run: dict[str, Any], report: Report
) -> None:
    for unit in range(run["plan"]["units"]):
        if unit not in markers:
            report.add("marker", marker_path(unit), f"missing, though {MANIFEST} says that the run is complete")
    if manifest.get("fingerprint", run["fingerprint"]) != run["fingerprint"]:
        report.add("manifest", MANIFEST, "its fingerprint is not the run's")
    entries = {entry["unit"]: entry for entry in manifest["shards"]}
    for unit in sorted(entries.keys() | {unit for unit, marker in markers.items() if marker.shard}):
        if unit not in entries or unit not in markers:
            report.add(
                "manifest",
                MANIFEST,
                f"{unit_name(unit)} is in {'the manifest' if unit in entries else 'the markers'} alone",
            )
            continue
        found, wanted = entries[unit], markers[unit]
        pairs = {
            "path": wanted.shard,
            **{name: getattr(wanted, name) for name in ("bytes", "sha256", "samples", "rows", "tokens")},
        }
        for name, value in pairs.items():
            if found.get(name) != value:
                report.add(
                    "manifest", MANIFEST, f"{unit_name(unit)}: {name} is {found.get(name)!r}, its marker says {value!r}"
                )


def _files(storage: Storage, markers: dict[int, Marker], finished: bool, report: Report) -> None:
    present = {info.path: info.size for info in storage.list(SHARDS)}
    named = {marker.shard for marker in markers.values()}
    elsewhere = [m for m in markers.values() if m.shard not in present and not storage.holds(m.node)]
    for marker in elsewhere:  # on another node's own disk: verified there
        report.count(f"shards on node {marker.node}")
    copied = any(marker.shard in present and not storage.holds(marker.node) for marker in markers.values())
    if elsewhere and (copied or not present):
        why = "though those of some nodes were copied here" if copied else "and none is seen from here: verify there"
        report.add("file", SHARDS, f"{len(elsewhere)} shards of other nodes are not here, {why}")
    # A node that was away may hold shards of earlier attempts.
    finished = finished and not isinstance(storage, PerNodeStorage)
    for path in present:
        if path not in named and (finished or not OUR_SHARD.fullmatch(path.rpartition("/")[2])):
            report.add("foreign", path, "no marker names this file")
    for unit, marker in markers.items():
        if marker.shard is not None and marker.shard not in present and storage.holds(marker.node):
            report.add("file", marker.shard, f"missing, {marker_path(unit)} names it")
        if marker.shard is None and (marker.samples or marker.rows):
            report.add("marker", marker_path(unit), f"names no shard and yet counts {marker.samples} samples")


def _plan(storage: Storage, run: dict[str, Any], report: Report) -> tuple[Counter[tuple[str, int]], set[int]]:
    """How often each (source, line) is in the plan, and the units whose plan can be read. One in memory at a time."""
    lines, ids, readable = Counter[tuple[str, int]](), Counter[str](), set()
    for unit in range(run["plan"]["units"]):
        try:
            samples = read_unit(storage, unit, run["plan"]["units_per_file"])
        except OutputError as error:
            report.add("plan", SAMPLES, str(error))
            continue
        readable.add(unit)
        lines.update((sample.source, sample.line) for sample in samples)
        ids.update(sample.sample_id for sample in samples)
    total = lines.total()
    if total != run["plan"]["samples"]:
        report.add("plan", SAMPLES, f"holds {total} samples, {RUN_JSON} says {run['plan']['samples']}")
    for what, counter in (("sample_id", ids), ("source and line", lines)):
        twice = [key for key, number in counter.items() if number > 1]
        if twice:
            report.add(
                "plan", SAMPLES, f"{len(twice)} values of {what} are there more than once, the first is {twice[0]!r}"
            )
    return lines, readable


def _shards(
    storage: Storage,
    run: dict[str, Any],
    markers: list[Marker],
    report: Report,
    workers: int | None,
) -> None:
    """Audit the shards in parallel (hashing and array work let other threads run), compare their samples in order."""
    spec = run_spec(run)
    present = {info.path for info in storage.list(SHARDS)}
    chosen = [marker for marker in markers if marker.shard in present]
    content = ContentChecks()

    def audit(marker: Marker) -> ShardAudit:
        failed = {reject.sample_id for reject in marker.failed}
        planned = read_unit(storage, marker.unit, run["plan"]["units_per_file"])
        samples = [sample for sample in planned if sample.sample_id not in failed]
        return audit_shard(storage, run, spec.columns, marker, samples)

    for marker in markers:
        if marker.fingerprint != run["fingerprint"]:
            report.add(
                "fingerprint",
                marker_path(marker.unit),
                f"is {marker.fingerprint[:16]}..., the run's is {run['fingerprint'][:16]}...",
            )
    for result in _parallel(audit, chosen, workers or min(8, os.cpu_count() or 1)):
        report.merge(result.report)
        report.count("shards")
        for probe in result.probes:
            content.add(probe)
    report.merge(content.report)


def _parallel(call: Any, items: list[Marker], workers: int) -> Iterator[ShardAudit]:
    """Results in order; at most twice `workers` wait to be taken."""
    with ThreadPoolExecutor(workers) as pool:
        pending, rest = [], iter(items)
        for item in rest:
            pending.append(pool.submit(call, item))
            if len(pending) >= 2 * workers:
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()


def _conservation(
    storage: Storage,
    run: dict[str, Any],
    markers: dict[int, Marker],
    manifest: dict[str, Any] | None,
    planned: Counter[tuple[str, int]],
    report: Report,
) -> None:
    """lines = samples + rejected + blank; samples = committed + failed; every other line is in `_rejects/` once."""
    plan = run["plan"]
    if plan["lines"] != plan["samples"] + plan["rejected"] + plan["blank"]:
        parts = f"{plan['samples']} samples + {plan['rejected']} rejected + {plan['blank']} blank"
        report.add("conservation", RUN_JSON, f"{plan['lines']} lines, but {parts}")
    committed, failed = (
        sum(m.samples for m in markers.values()),
        [reject for m in markers.values() for reject in m.failed],
    )
    report.count("failed", len(failed))
    report.count("rejected", plan["rejected"])
    for reject in failed:
        if (reject.source, reject.line) not in planned:
            report.add("conservation", DONE, f"failed sample {reject.sample_id!r} is not in the plan")
    if not (manifest and manifest.get("complete")):
        return
    if plan["samples"] != committed + len(failed):
        report.add(
            "conservation", DONE, f"{plan['samples']} samples planned, but {committed} committed + {len(failed)} failed"
        )
    counts = {name: plan[name] for name in ("lines", "blank", "rejected", "samples")} | {
        "committed": committed,
        "failed": len(failed),
    }
    counts |= {name: sum(getattr(m, name) for m in markers.values()) for name in ("tokens", "rows", "bytes")}
    for name, value in counts.items():
        if manifest["counts"].get(name) != value:
            report.add(
                "conservation", MANIFEST, f"{name} is {manifest['counts'].get(name)!r}, plan and markers give {value}"
            )
    files = [info.path for info in storage.list(REJECTS)]
    try:
        listed = [json.loads(line) for data in storage.read_many(files) for line in data.splitlines() if line.strip()]
    except ValueError as error:
        report.add("conservation", REJECTS, f"cannot be read ({error})")
        return
    lines = Counter((entry["source"], entry["line"]) for entry in listed)
    if len(listed) != plan["rejected"] + len(failed) or max(lines.values(), default=1) > 1:
        without = f"{plan['rejected']} rejected + {len(failed)} failed"
        report.add(
            "conservation", REJECTS, f"{len(listed)} entries for {len(lines)} lines; without states are {without}"
        )
    both = lines.keys() & planned.keys() - {(reject.source, reject.line) for reject in failed}
    if both:
        report.add(
            "conservation",
            REJECTS,
            f"{len(both)} lines are listed though they are samples with states, the first is {min(both)}",
        )
