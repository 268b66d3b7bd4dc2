"""What the cluster gives to this job: the device, how many engines, and each one's options."""

import os

from hs_ray.config import ExtractJob
from hs_ray.engine.options import EngineOptions
from hs_ray.errors import ConfigError
from hs_ray.pipeline.cluster import Cluster
from hs_ray.plan import ResolvedJob

RING_BYTES = {"cpu": 2**30, "cuda": 8 * 2**30}  # shared memory of one engine, unless the plan needs more
ROWS_IN_RING = 4  # the longest sample must fit this often


def device_of(job: ExtractJob, found: Cluster) -> str:
    if job.engine.device == "cuda" and not found.gpus:
        raise ConfigError("engine.device = cuda: the Ray cluster has no GPU; use engine.device=cpu, or add one")
    return job.engine.device if job.engine.device != "auto" else ("cuda" if found.gpus else "cpu")


def replicas_of(job: ExtractJob, found: Cluster, device: str) -> int:
    """Engines to start. Raises ConfigError for more GPUs than the cluster, or one node for one engine, has."""
    if device == "cpu":
        return 1 if job.engine.replicas == "auto" else int(job.engine.replicas)
    tp_size, largest = job.engine.tp_size, max(found.gpus_by_node)
    if tp_size > largest:
        raise ConfigError(
            f"engine.tp_size = {tp_size}: an engine lives in one node, and no node of the cluster has more than "
            f"{largest} GPUs; use engine.tp_size={largest} with weights that fit (for example "
            f"+engine.args.quantization=fp8), or nodes with more GPUs"
        )
    fit = found.engines(tp_size)
    replicas = fit if job.engine.replicas == "auto" else int(job.engine.replicas)
    if replicas < 1 or replicas > fit:
        raise ConfigError(
            f"engine.replicas = {job.engine.replicas}, engine.tp_size = {tp_size}: the Ray cluster has "
            f"{found.gpus} GPUs, room for {fit} engines of that size"
        )
    return replicas


def units_at_once(job: ExtractJob) -> int:
    """Units in one engine, each with a thread that writes it: as many as keep up with an 8B model on one H200."""
    if job.cluster.prefetch_units != "auto":
        return int(job.cluster.prefetch_units)
    return 8 if job.output.compression.value == "split_zstd" else 4


def engine_options(resolved: ResolvedJob, release: str, device: str, longest_tokens: int) -> EngineOptions:
    """One engine's options. Raises ConfigError if its shared memory cannot hold the longest sample several times."""
    job, spec = resolved.job, resolved.spec
    need = ROWS_IN_RING * longest_tokens * spec.bytes_per_token
    if job.engine.max_inflight_tokens == "auto":
        ring = max(RING_BYTES[device], need)
    else:
        ring = job.engine.max_inflight_tokens * spec.bytes_per_token
    if ring < need:
        raise ConfigError(
            f"engine.max_inflight_tokens = {job.engine.max_inflight_tokens}: the longest sample has {longest_tokens:,} "
            f"tokens, and {ROWS_IN_RING} of them must fit: at least {ROWS_IN_RING * longest_tokens:,}, or auto"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if ring > memory // 2:
        raise ConfigError(
            f"engine.max_inflight_tokens = {job.engine.max_inflight_tokens}: {ROWS_IN_RING} x {longest_tokens:,} "
            f"tokens x {spec.bytes_per_token:,} bytes = {ring:,} bytes of shared memory, more than half of this "
            f"machine's {memory:,}; lower max_seq_len, or capture fewer layers"
        )
    engine = job.engine
    return EngineOptions(
        spec=spec,
        architecture=resolved.model.architecture,
        model_path=resolved.model.path,
        release=release,
        vocab_size=resolved.model.vocab_size,
        context_length=resolved.model.context_length,
        max_seq_len=job.max_seq_len,
        device=device,
        ring_bytes=ring,
        tp_size=engine.tp_size,
        trust_remote_code=job.model.trust_remote_code,
        chunked_prefill_size=engine.chunked_prefill_size,
        mem_fraction_static=engine.mem_fraction_static,
        attention_backend=engine.attention_backend,
        args=dict(engine.args),
    )
