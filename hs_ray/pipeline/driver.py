"""The driver: preflight -> plan -> estimate -> extract -> manifest. It holds no state that matters.

Exit codes: 0 complete, 1 the run failed, 2 (raised as UserError) the user must change something, 3 complete, but
some lines or samples have no states.
"""

import contextlib
import getpass
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

from hs_ray.config import ExtractJob, parse_bytes
from hs_ray.errors import HsRayError, RunError, UnsupportedError
from hs_ray.inputs import split_sources
from hs_ray.lease import Lease
from hs_ray.manifest import MarkerIndex, build_manifest, clean_leftovers, drop_untrusted
from hs_ray.model import final_norm
from hs_ray.pipeline import cluster, nodes, planning
from hs_ray.pipeline.actor import ActorJob
from hs_ray.pipeline.extraction import Extraction, extract_units
from hs_ray.pipeline.preflight import Preflight, existing_run, preflight
from hs_ray.pipeline.progress import Total
from hs_ray.pipeline.resources import device_of, engine_options, replicas_of, units_at_once
from hs_ray.plan import (
    PlanSummary,
    ResolvedJob,
    build_plan,
    check_fits,
    check_rejected,
    estimate,
    fingerprint,
    format_estimate,
    load_summary,
    measured_rate,
    write_run,
)
from hs_ray.report import write_report
from hs_ray.schema import FINAL_NORM, MANIFEST, Marker, shard_metadata
from hs_ray.storage import Storage, when_there_is_room
from hs_ray.weights import norm_digest

INDEX_S = 10.0  # between writes of the markers' index


def run(job: ExtractJob) -> int:
    """jobs/extract.py after its configuration is loaded. Returns the exit code."""
    flight = preflight(job)
    say(f"model {flight.resolved.model.name}, {len(flight.sources)} input files, output {flight.storage.root}")
    if job.model.trust_remote_code:
        say("model.trust_remote_code = true: code that comes with the model runs on every node")
    if job.dry_run:
        return _dry_run(flight)
    flight.storage.check_writable()  # first: a wrong address is told in seconds, and the fingerprint reads the input
    key = fingerprint(flight.resolved, flight.sources, flight.versions)
    existing = existing_run(flight, key)
    holder = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    lease = Lease.acquire(flight.storage, job.cluster.lease_seconds, holder)
    lease.start()
    try:
        with _stop_on_sigterm(job.cluster.grace_seconds) as stop:
            return _run(flight, key, existing, lease, stop)
    except Stopped:
        return Stopped.exit_code
    finally:
        cluster.disconnect()
        lease.release()


def _run(
    flight: Preflight, key: tuple[str, dict[str, str]], run: dict[str, Any] | None, lease: Lease, stop: "Stop"
) -> int:
    storage, job = flight.storage, flight.resolved.job
    markers: dict[int, Marker] = {}
    _see_every_disk(flight, check=True)
    away = partial(nodes.check_nothing_is_away, storage, job.output.redo_lost)
    if run is not None:
        markers = drop_untrusted(storage, lease.epoch, key[0], partial(away, False))
        plan = load_summary(run)
        say(f"resuming: {len(markers):,} of {plan.units:,} units are committed and are not done again")
    else:
        plan = _plan(flight, storage)
        check_rejected(plan, job.input.max_rejected)
        _write_final_norm(storage, flight.resolved)
        run = write_run(storage, flight.resolved, plan, flight.sources, key, flight.versions)
    clean_leftovers(storage, lease.epoch, markers)
    MarkerIndex(storage).replace(markers.values())
    remaining = [unit for unit in range(plan.units) if unit not in markers]
    if remaining:
        _extract(flight, key[0], plan, markers, remaining, lease, stop)
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
    return _finish(storage, run, markers)


def _see_every_disk(flight: Preflight, check: bool = False) -> None:
    """Where shards are on each node's own disk, the driver asks the nodes for them. check: that they can be written."""
    if flight.resolved.job.output.node_path:
        cluster.connect(flight.resolved.job.cluster.address)
        nodes.see_every_disk(flight.storage, check)


def _extract(
    flight: Preflight,
    key: str,
    plan: PlanSummary,
    markers: dict[int, Marker],
    remaining: Sequence[int],
    lease: Lease,
    stop: "Stop",
) -> None:
    """Commit the remaining units; `markers` grows as they come."""
    job, storage = flight.resolved.job, flight.storage
    found = cluster.connect(job.cluster.address)
    nodes.check_shared(storage)
    device = device_of(job, found)
    replicas = replicas_of(job, found, device)
    rate = job.cluster.tokens_per_second or measured_rate(storage, markers)
    done_tokens = sum(marker.tokens for marker in markers.values())
    numbers = estimate(flight.resolved, plan, storage, rate, replicas, device, done_tokens)
    print(format_estimate(numbers), flush=True)
    check_fits(numbers, sum(marker.bytes for marker in markers.values()))
    options = engine_options(flight.resolved, flight.versions["sglang"], device, plan.longest_tokens)
    engines = min(replicas, len(remaining))
    actor_job = ActorJob(
        storage=storage,
        options=options,
        model=job.model,
        model_digest=flight.resolved.model.digest,
        fingerprint=key,
        epoch=lease.epoch,
        units_per_file=plan.units_per_file,
        compression=job.output.compression.value,
        metadata=_metadata(flight, key),
        min_free_bytes=parse_bytes(job.output.min_free_bytes),
        max_retries=job.cluster.max_retries,
        engines=engines,
        canary=job.capture.canary,
        prove=job.capture.prove.value,
    )
    extraction = Extraction(
        actor_job,
        list(remaining),
        Total(
            units=plan.units,
            samples=plan.samples,
            tokens=plan.tokens,
            bytes_per_token=flight.resolved.spec.bytes_per_token,
            engines=engines,
            rejected=plan.rejected + sum(len(marker.failed) for marker in markers.values()),
            earlier_units=len(markers),
            earlier_samples=sum(marker.samples for marker in markers.values()),
            earlier_tokens=sum(marker.tokens for marker in markers.values()),
        ),
        gpus=job.engine.tp_size if device == "cuda" else 0,
        at_once=units_at_once(job),
        progress_s=job.cluster.progress_seconds,
        stopping=stop.draining,
    )
    index, flushed = MarkerIndex(storage), time.monotonic()
    stop.can_drain = True
    try:
        for marker in extract_units(extraction):
            markers[marker.unit] = replace(marker, checksums={})  # one a sample: too many to keep
            index.add(marker)
            if time.monotonic() - flushed > INDEX_S:
                lease.check()
                index.flush()
                flushed = time.monotonic()
    finally:
        stop.can_drain = False
        index.flush()


def _finish(storage: Storage, run: dict[str, Any], markers: dict[int, Marker]) -> int:
    manifest = when_there_is_room(lambda: build_manifest(storage, run, markers), lambda reason, _: say(reason))
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
    job = flight.resolved.job
    plan = _plan(flight, None)
    numbers = estimate(flight.resolved, plan, flight.storage, job.cluster.tokens_per_second)
    print(format_estimate(numbers), flush=True)
    cluster.disconnect()
    check_rejected(plan, job.input.max_rejected)
    check_fits(numbers)
    return 0


def _plan(flight: Preflight, storage: Storage | None) -> PlanSummary:
    """storage None: count, and write nothing."""
    say("planning: reading and tokenizing the input")
    found = cluster.connect(flight.resolved.job.cluster.address)
    chunks = split_sources(flight.sources)
    tables = planning.read_tables(chunks, flight.resolved.tokenize_settings, found.cpus)
    return build_plan(storage, planning.counted(tables, flight.resolved.job.cluster.progress_seconds), flight.resolved)


def _write_final_norm(storage: Storage, resolved: ResolvedJob) -> None:
    """The norm that turns `final_pre_norm` into `final_post_norm`. Raises UnsupportedError only where it is needed."""
    from safetensors.torch import save

    try:
        weight, eps, kind = final_norm(resolved.model)
    except UnsupportedError:
        if "final_pre_norm" in resolved.spec.columns:
            raise
        return
    facts = {"eps": repr(eps), "kind": kind, "sha256": norm_digest(weight, eps, kind)}
    storage.write(FINAL_NORM, save({"weight": weight.contiguous()}, metadata=facts))


def _metadata(flight: Preflight, key: str) -> dict[str, Any]:
    model = flight.resolved.model
    return shard_metadata(
        flight.resolved.spec,
        model=model.name,
        revision=model.revision,
        fingerprint=key,
        compression=flight.resolved.job.output.compression.value,
        versions=flight.versions,
    )


class Stopped(HsRayError):
    """SIGTERM: the node is being taken away, or `ray job stop`."""


class Stop:
    """What SIGTERM leads to: at once, or after the units in hand are finished, if that may take some time."""

    def __init__(self, grace_s: float):
        self.grace_s = grace_s
        self.can_drain = False
        self.draining = Event()

    def on_sigterm(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        if not (self.can_drain and self.grace_s > 0):
            self.on_alarm()
        _write(f"hs_ray: SIGTERM: finishing the units in hand, {self.grace_s:g} s at most\n")
        signal.signal(signal.SIGALRM, self.on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        self.draining.set()

    def on_alarm(self, *_: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        _write("hs_ray: stopped by SIGTERM: what is committed stays; run the same command again to resume\n")
        raise Stopped


def _write(text: str) -> None:
    """At once, and not through print, which may be what was interrupted: SIGKILL follows in 3 s under Ray."""
    os.write(1, text.encode())


@contextlib.contextmanager
def _stop_on_sigterm(grace_s: float) -> Iterator[Stop]:
    stop = Stop(grace_s)
    before = signal.signal(signal.SIGTERM, stop.on_sigterm)
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    print(f"hs_ray: {text}", flush=True)
