"""`verify` without a second model: files, markers, plan, rows, states, conservation."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hs_ray.errors import HsRayError
from hs_ray.plan import read_unit
from hs_ray.reader import FinalNorm, HiddenStatesDataset
from hs_ray.reader.output import check_complete
from hs_ray.reader.run import find_shards, run_spec
from hs_ray.schema import MANIFEST, SHARDS, Marker, marker_path
from hs_ray.storage import Storage
from hs_ray.verify.conservation import check_conservation, check_failed, check_rejects
from hs_ray.verify.content import ContentChecks
from hs_ray.verify.lists import check_files, check_manifest, load_manifest, load_markers
from hs_ray.verify.marker import check_marker
from hs_ray.verify.norm import check_final_norm
from hs_ray.verify.plan import check_plan
from hs_ray.verify.report import Log, Report, with_progress
from hs_ray.verify.run import check_run, read_run
from hs_ray.verify.shard import ShardAudit, audit_shard


def verify_integrity(
    storage: Storage, incomplete: bool = False, workers: int | None = None, log: Log | None = None
) -> Report:
    """Check everything that can be checked without the model. log: is told every few seconds how far it is.

    Raises OutputError where there is no run to check, or an unfinished one without `incomplete`; ShardError where
    run.json, which says what to check, is damaged; OSError at the first outage of its disk or store. Every other
    trouble is a problem in the report.
    """
    run = read_run(storage)
    storage = find_shards(storage, run)
    report = Report()
    manifest = load_manifest(storage, report)
    if not incomplete:
        check_complete(storage, manifest, "verify.incomplete=true")
    complete = manifest if manifest and manifest.get("complete") else None
    markers = load_markers(storage, run["plan"]["units"], report)
    run = check_run(run, markers, report)
    if complete:
        check_manifest(complete, markers, run, report)
    check_files(storage, markers, bool(manifest), report)
    norm = check_final_norm(storage, run_spec(run), report)
    planned = check_plan(storage, run, report, log)
    readable = [marker for marker in markers.values() if marker.unit in planned.units]
    _shards(storage, run, readable, norm, report, workers, log)
    check_conservation(run, markers, complete, report)
    check_rejects(storage, run, markers, complete, planned.lines.keys(), report)
    if report.ok:
        _open_as_readers_do(storage, incomplete, report)
    return report


def _open_as_readers_do(storage: Storage, incomplete: bool, report: Report) -> None:
    """An output in which nothing was found is one that can be read; else a check is missing above."""
    try:
        HiddenStatesDataset(storage, rank=0, world_size=1, incomplete=incomplete)
    except HsRayError as error:
        report.add("reader", MANIFEST, f"refused ({error})")


def _shards(
    storage: Storage,
    run: dict[str, Any],
    markers: list[Marker],
    norm: FinalNorm | None,
    report: Report,
    workers: int | None,
    log: Log | None,
) -> None:
    """Audit units in parallel (hashing and array work let other threads run), compare their samples in order."""
    spec = run_spec(run)
    present = {info.path for info in storage.list(SHARDS)}
    content = ContentChecks()

    def audit(marker: Marker) -> ShardAudit:
        planned = read_unit(storage, marker.unit, run["plan"]["units_per_file"])
        of_marker = Report()
        here = marker.shard in present
        check_failed(marker, planned, here, of_marker)
        check_marker(marker, spec, planned, of_marker)
        if not here:
            return ShardAudit(of_marker)
        failed = {reject.sample_id for reject in marker.failed}
        samples = [sample for sample in planned if sample.sample_id not in failed]
        of_shard = audit_shard(storage, run, spec.columns, marker, samples, norm)
        of_shard.report.merge(of_marker)
        of_shard.report.count("shards")
        return of_shard

    for marker in markers:
        if marker.fingerprint != run["fingerprint"]:
            report.add(
                "fingerprint",
                marker_path(marker.unit),
                f"is {marker.fingerprint[:16]}..., the run's is {run['fingerprint'][:16]}...",
            )
    results = _parallel(audit, markers, workers or min(8, os.cpu_count() or 1))
    for result in with_progress(results, "shards", len(markers), report, log):
        report.merge(result.report)
        for probe in result.probes:
            content.add(probe)
    report.merge(content.report)


def _parallel(call: Any, items: list[Marker], workers: int) -> Iterator[ShardAudit]:
    """Results in order; at most twice `workers` wait to be taken."""
    with ThreadPoolExecutor(workers) as pool:
        pending = []
        try:
            for item in items:
                pending.append(pool.submit(call, item))
                if len(pending) >= 2 * workers:
                    yield pending.pop(0).result()
            for future in pending:
                yield future.result()
        except BaseException:  # an outage: each of those that wait would be ten minutes finding out the same
            pool.shutdown(cancel_futures=True)
            raise
