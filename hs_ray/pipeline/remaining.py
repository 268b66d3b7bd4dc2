"""The units that are left, through the engines: what the actors are told, and the markers as they come."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from hs_ray.config import parse_bytes
from hs_ray.engine.options import EngineOptions
from hs_ray.lease import Lease
from hs_ray.manifest import MarkerIndex
from hs_ray.pipeline.actor import ActorJob
from hs_ray.pipeline.extraction import Extraction, extract_units
from hs_ray.pipeline.preflight import Preflight
from hs_ray.pipeline.progress import Total
from hs_ray.pipeline.resources import units_at_once
from hs_ray.pipeline.stop import Stop
from hs_ray.plan import PlanSummary
from hs_ray.schema import Marker, shard_metadata

INDEX_S = 10.0  # between writes of the markers' index
INPUT_BYTES = 8  # a token of a shard beside its states: its id, and a loss mask in Parquet's 4 bytes


@dataclass(frozen=True)
class Engines:
    """What this run gets of the cluster."""

    options: EngineOptions
    count: int
    gpus: int  # of one engine; 0 on CPU


def extract_remaining(
    flight: Preflight,
    key: str,
    plan: PlanSummary,
    markers: dict[int, Marker],
    remaining: Sequence[int],
    engines: Engines,
    lease: Lease,
    stop: Stop,
) -> None:
    """Commit the remaining units; `markers` grows as they come."""
    job, storage = flight.resolved.job, flight.storage
    actor_job = ActorJob(
        storage=storage,
        options=engines.options,
        model=flight.resolved.pinned_model,
        model_digest=flight.resolved.model.digest,
        fingerprint=key,
        epoch=lease.epoch,
        units_per_file=plan.units_per_file,
        compression=job.output.compression.value,
        metadata=_metadata(flight, key),
        min_free_bytes=parse_bytes(job.output.min_free_bytes),
        scratch_bytes=min(units_at_once(job), len(remaining)) * _shard_bytes(flight, plan),
        max_retries=job.cluster.max_retries,
        engines=engines.count,
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
            engines=engines.count,
            rejected=plan.rejected + sum(len(marker.failed) for marker in markers.values()),
            earlier_units=len(markers),
            earlier_samples=sum(marker.samples for marker in markers.values()),
            earlier_tokens=sum(marker.tokens for marker in markers.values()),
        ),
        gpus=engines.gpus,
        at_once=units_at_once(job),
        progress_s=job.cluster.progress_seconds,
        stopping=stop.draining,
    )
    index, flushed = MarkerIndex(storage), time.monotonic()
    stop.can_drain = True
    try:
        with closing(extract_units(extraction)) as committed:  # also for an exception, whose traceback would keep it
            for marker in committed:
                markers[marker.unit] = replace(marker, checksums={})  # one a sample: too many to keep
                index.add(marker)
                if time.monotonic() - flushed > INDEX_S:
                    lease.check()
                    index.flush()
                    flushed = time.monotonic()
    finally:
        stop.can_drain = False
        index.flush()


def _shard_bytes(flight: Preflight, plan: PlanSummary) -> int:
    """At most of one shard: a unit of long samples may be several times as large as `output.shard_bytes`."""
    tokens = plan.largest_unit_tokens or max(flight.resolved.unit_tokens, plan.longest_tokens)
    return tokens * (flight.resolved.spec.bytes_per_token + INPUT_BYTES)


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
