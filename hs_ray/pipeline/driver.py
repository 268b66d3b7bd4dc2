"""The driver: preflight -> plan -> estimate -> extract -> manifest. It holds no state that matters.

Exit codes: 0 complete, 1 the run failed, 2 (raised as UserError) the user must change something, 3 complete, but
some lines or samples have no states.
"""

import contextlib
import getpass
import os
import socket
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from hs_ray import prove
from hs_ray.config import ExtractJob
from hs_ray.errors import RunError, UnsupportedError
from hs_ray.inputs import split_sources
from hs_ray.lease import Lease
from hs_ray.manifest import MarkerIndex, build_manifest, clean_leftovers, drop_untrusted, read_markers
from hs_ray.model import final_norm
from hs_ray.pipeline import cluster, nodes, planning
from hs_ray.pipeline.metrics import Metrics
from hs_ray.pipeline.preflight import Preflight, existing_run, preflight
from hs_ray.pipeline.remaining import Engines, extract_remaining
from hs_ray.pipeline.resources import device_of, engine_options, replicas_of
from hs_ray.pipeline.stop import Stop, Stopped, stop_on_sigterm
from hs_ray.plan import (
    PlanSummary,
    ResolvedJob,
    build_plan,
    check_fits,
    check_rejected,
    estimate,
    fingerprint,
    format_estimate,
    load_run,
    load_summary,
    measured_rate,
    resolve,
    supersede,
    without_weights,
    write_run,
)
from hs_ray.report import write_report
from hs_ray.schema import DONE, FINAL_NORM, MANIFEST, Marker
from hs_ray.storage import OnWait, Storage, when_there_is_room
from hs_ray.weights import norm_digest

WAITING_S = 15  # between two lines while a disk is full


def run(job: ExtractJob) -> int:
    """jobs/extract.py after its configuration is loaded. Returns the exit code."""
    try:
        return _start(job)
    except OSError as error:  # a disk or a store is unwell: where in our code it was met helps nobody
        raise RunError(
            f"the run failed: {type(error).__name__}: {error}; run the same command again to resume"
        ) from error


def _start(job: ExtractJob) -> int:
    flight = preflight(job)
    say(f"model {flight.resolved.model.name}, {len(flight.sources)} input files, output {flight.storage.root}")
    if job.model.trust_remote_code:
        say("model.trust_remote_code = true: code that comes with the model runs on every node")
    if job.dry_run:
        return _dry_run(_at_its_commit(flight))
    flight.storage.check_writable()  # first: a wrong address is told in seconds, and the fingerprint reads the input
    flight = _at_its_commit(flight)
    key = fingerprint(flight.resolved, flight.sources, flight.versions)
    existing_run(flight, key)  # refuses before there is a lease: a driver that holds one loses it to no mistake
    holder = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    lease = Lease.acquire(flight.storage, job.cluster.lease_seconds, holder)
    lease.start()
    try:
        with stop_on_sigterm(job.cluster.grace_seconds) as stop:
            return _run(flight, key, lease, stop)
    except Stopped:
        return Stopped.exit_code
    finally:
        cluster.disconnect()
        lease.release()


def _at_its_commit(flight: Preflight) -> Preflight:
    """A hub model without `model.revision`: what was begun goes on with its commit, whatever was pushed since."""
    job, model, run = flight.resolved.job, flight.resolved.model, load_run(flight.storage)
    if run is None or job.model.revision is not None or run.get("model", {}).get("name") != model.name:
        return flight
    commit = run["model"].get("revision")
    if commit in (None, model.revision) or not flight.storage.list(DONE):  # nothing of it: the newest will do
        return flight
    say(f"{model.name}: going on with the commit {commit}, which this run began with; {model.revision} is newer")
    return replace(flight, resolved=resolve(replace(job, model=replace(job.model, revision=commit))))


def _run(flight: Preflight, key: tuple[str, dict[str, str]], lease: Lease, stop: Stop) -> int:
    storage, job = flight.storage, flight.resolved.job
    on_wait = partial(_wait, lease)
    markers: dict[int, Marker] = {}
    _see_every_disk(flight, check=True)
    away = partial(nodes.check_nothing_is_away, storage, job.output.redo_lost)
    run = existing_run(flight, key)  # again: under the lease it stays what it is
    if run is not None:
        markers = drop_untrusted(storage, lease.epoch, key[0], partial(away, False))
    clean_leftovers(storage, lease.epoch, markers)
    if run is not None:
        plan = load_summary(run)
        _say_resuming(run, job, plan, markers)
        when_there_is_room(lambda: _write_final_norm(storage, flight.resolved), on_wait)
    else:
        when_there_is_room(lambda: supersede(storage), on_wait)
        plan = _plan(flight, storage, lease)
        check_rejected(plan, job.input.max_rejected)
    remaining = [unit for unit in range(plan.units) if unit not in markers]
    engines = _engines(flight, plan, markers, len(remaining), on_wait) if remaining else None
    if run is None:  # only now: what is refused up to here may be changed, and the same output used
        lease.check()
        run = _begin(flight, plan, key, on_wait)
    MarkerIndex(storage).replace(markers.values())
    if engines is not None:
        extract_remaining(flight, key[0], plan, markers, remaining, engines, lease, stop)
        _see_every_disk(flight)  # again: the engines have ended, and Ray's connection with them
        markers = drop_untrusted(storage, lease.epoch, key[0], partial(away, True))  # what is there, not what was told
        clean_leftovers(storage, lease.epoch, markers)
    elif storage.exists(MANIFEST):
        say("nothing to do: every unit is committed")
    if lost := plan.units - len(markers):
        raise RunError(
            f"{lost:,} units were committed and their shards are gone again, by hand or with a node's disk; "
            "run the same command again: it does them anew"
        )
    return _finish(storage, run, markers, on_wait)


def _say_resuming(run: dict[str, Any], job: ExtractJob, plan: PlanSummary, markers: dict[int, Marker]) -> None:
    """A plan stays as it was made."""
    say(f"resuming: {len(markers):,} of {plan.units:,} units are committed and are not done again")
    made, given = run["config"]["output"]["shard_bytes"], job.output.shard_bytes
    if made != given:
        say(f"output.shard_bytes = {given}: the plan that was made with {made} is kept")


def _see_every_disk(flight: Preflight, check: bool = False) -> None:
    """Where shards are on each node's own disk, the driver asks the nodes for them. check: that they can be written."""
    if flight.resolved.job.output.node_path:
        cluster.connect(flight.resolved.job.cluster.address)
        nodes.see_every_disk(flight.storage, check)


def _engines(
    flight: Preflight, plan: PlanSummary, markers: dict[int, Marker], remaining: int, on_wait: OnWait
) -> Engines:
    """Connect, print the estimate, and refuse (UserError) what does not fit: the last that can, on the driver."""
    job, storage, model = flight.resolved.job, flight.storage, flight.resolved.model
    found = cluster.connect(job.cluster.address)
    when_there_is_room(lambda: nodes.check_shared(storage), on_wait)
    device = device_of(job, found)
    prove.check(model.architecture, flight.versions["sglang"], model.name, device)
    replicas = replicas_of(job, found, device)
    rate = job.cluster.tokens_per_second or measured_rate(storage, markers)
    done_tokens = sum(marker.tokens for marker in markers.values())
    numbers = estimate(flight.resolved, plan, storage, rate, replicas, device, done_tokens)
    print(format_estimate(numbers), flush=True)
    check_fits(numbers, sum(marker.bytes for marker in markers.values()))
    options = engine_options(flight.resolved, flight.versions["sglang"], device, plan.longest_tokens)
    return Engines(options, min(replicas, remaining), job.engine.tp_size if device == "cuda" else 0)


def _begin(flight: Preflight, plan: PlanSummary, key: tuple[str, dict[str, str]], on_wait: OnWait) -> dict[str, Any]:
    """From here on the output is this run's. Returns run.json."""
    storage, resolved = flight.storage, flight.resolved
    when_there_is_room(lambda: _write_final_norm(storage, resolved), on_wait)
    run = when_there_is_room(lambda: write_run(storage, resolved, plan, flight.sources, key, flight.versions), on_wait)
    Metrics("driver", ray.util.get_node_ip_address()).rejected(plan.rejected)  # once: a resumed run has counted them
    return run


def _finish(storage: Storage, run: dict[str, Any], markers: dict[int, Marker], on_wait: OnWait) -> int:
    manifest = when_there_is_room(lambda: build_manifest(storage, run, markers), on_wait)
    counts = manifest["counts"]
    say(
        f"complete: {counts['committed']:,} samples, {counts['tokens']:,} tokens, {counts['bytes'] / 1e9:.2f} GB in "
        f"{len(manifest['shards']):,} shards; {counts['rejected']:,} lines rejected, "
        f"{counts['failed']:,} samples failed"
    )
    for code, count in counts["rejects_by_code"].items():
        say(f"  rejected: {code} {count:,} (see {storage.root}/_rejects/)")
    _report(storage, markers)
    return 3 if counts["rejected"] or counts["failed"] else 0


def _report(storage: Storage, markers: dict[int, Marker]) -> None:
    """A page for people: no run fails for it."""
    try:
        say(f"report: {write_report(storage, markers)}")
    except Exception as error:  # noqa: BLE001
        say(f"the report was not written: {error}")


def _dry_run(flight: Preflight) -> int:
    """The estimate; nothing is written anywhere."""
    job, storage = flight.resolved.job, flight.storage
    key = fingerprint(flight.resolved, flight.sources, flight.versions)
    run = existing_run(flight, without_weights(key, flight.resolved.model, load_run(storage)))  # refuses as a run would
    markers = {} if run is None else read_markers(storage, run["fingerprint"])
    plan = _plan(flight, None, None) if run is None else load_summary(run)
    if run is not None:
        _say_resuming(run, job, plan, markers)
    rate = job.cluster.tokens_per_second or measured_rate(storage, markers)
    done_tokens = sum(marker.tokens for marker in markers.values())
    numbers = estimate(flight.resolved, plan, storage, rate, done_tokens=done_tokens)
    print(format_estimate(numbers), flush=True)
    cluster.disconnect()
    if run is None:
        check_rejected(plan, job.input.max_rejected)
    if len(markers) < plan.units:
        check_fits(numbers, sum(marker.bytes for marker in markers.values()))
    return 0


def _plan(flight: Preflight, storage: Storage | None, lease: Lease | None) -> PlanSummary:
    """storage None: count, and write nothing. Raises LostLeaseError rather than write over a newer driver's plan."""
    say("planning: reading and tokenizing the input")
    found = cluster.connect(flight.resolved.job.cluster.address)
    chunks = split_sources(flight.sources)
    every_s = flight.resolved.job.cluster.progress_seconds
    with closing(planning.read_tables(chunks, flight.resolved.tokenize_settings, found.cpus)) as tables:
        counted = planning.counted(tables, every_s)
        if lease is not None:
            counted = planning.while_held(counted, lease)
        return build_plan(storage, counted, flight.resolved, partial(_wait, lease))


def _write_final_norm(storage: Storage, resolved: ResolvedJob) -> None:
    """The norm that turns `final_pre_norm` into `final_post_norm`. Raises UnsupportedError only where it is needed.

    Of a run that goes on too: the manifest will name what is there, were it another model's.
    """
    from safetensors.torch import save

    try:
        weight, eps, kind = final_norm(resolved.model)
    except UnsupportedError:
        if "final_pre_norm" in resolved.spec.columns:
            raise
        storage.remove(FINAL_NORM)  # of another model, whose run committed nothing here
        return
    facts = {"eps": repr(eps), "kind": kind, "sha256": norm_digest(weight, eps, kind)}
    content = save({"weight": weight.contiguous()}, metadata=facts)
    with contextlib.suppress(FileNotFoundError):
        if storage.read_bytes(FINAL_NORM) == content:
            return
    storage.write(FINAL_NORM, content)


def say(text: str) -> None:
    print(f"hs_ray: {text}", flush=True)


def _wait(lease: Lease | None, reason: str, waited_s: float) -> None:
    """While a full disk is waited for; no heartbeat can be written then, so another driver may have taken over."""
    if lease is not None:
        lease.check()
    if waited_s % WAITING_S == 0:
        say(f"waiting: {reason}")
