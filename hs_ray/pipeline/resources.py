"""What the cluster gives to this job: the device, how many engines, and each one's options."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import ray

from hs_ray.config import ExtractJob
from hs_ray.engine.options import EngineOptions
from hs_ray.errors import ConfigError
from hs_ray.pipeline.cluster import Cluster
from hs_ray.plan import ResolvedJob
from hs_ray.schema import CaptureSpec
from hs_ray.storage import Storage

RING_BYTES = {"cpu": 2**30, "cuda": 8 * 2**30}  # shared memory of one engine, unless the plan needs more
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1
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
    """Units in one engine, each with a thread that writes it, at 0.7 to 1 GB/s.

    Four keep up with an 8B model on one H200 (1.3 GB/s). Several GPUs compute a wider model: Kimi-K2.5 gives 3.4 GB/s.
    """
    if job.cluster.prefetch_units != "auto":
        return int(job.cluster.prefetch_units)
    return 8 if job.output.compression.value == "split_zstd" or job.engine.tp_size > 1 else 4


def engine_options(resolved: ResolvedJob, release: str, device: str, longest_tokens: int) -> EngineOptions:
    """One engine's options. Raises ConfigError if fewer tokens may be in flight than the longest sample needs."""
    job, spec = resolved.job, resolved.spec
    least = _least_ring(longest_tokens, spec)
    if job.engine.max_inflight_tokens == "auto":
        ring = max(RING_BYTES[device], least)
    else:
        ring = job.engine.max_inflight_tokens * spec.bytes_per_token
    if ring < least:
        raise ConfigError(
            f"engine.max_inflight_tokens = {job.engine.max_inflight_tokens}: the longest sample has {longest_tokens:,} "
            f"tokens, and {ROWS_IN_RING} of them must fit: at least {ROWS_IN_RING * longest_tokens:,}, or auto"
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
        longest_tokens=longest_tokens,
        tp_size=engine.tp_size,
        trust_remote_code=job.model.trust_remote_code,
        chunked_prefill_size=engine.chunked_prefill_size,
        mem_fraction_static=engine.mem_fraction_static,
        attention_backend=engine.attention_backend,
        args=dict(engine.args),
    )


def _least_ring(longest_tokens: int, spec: CaptureSpec) -> int:
    return ROWS_IN_RING * longest_tokens * spec.bytes_per_token


def engines_of_this_node(engines: int, options: EngineOptions) -> int:
    """The most of `engines` that may run on the node of this actor."""
    here = ray.get_runtime_context().get_node_id()
    has = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    room = has.get("CPU", 0) if options.device == "cpu" else has.get("GPU", 0) // options.tp_size
    return max(1, min(engines, int(room)))  # one on CPU asks Ray for one CPU


def fit_ring(options: EngineOptions, memory: int) -> EngineOptions:
    """No more than half of the memory that this engine may count as its own. memory: bytes.

    Raises ConfigError if the longest sample does not fit into that several times.
    """
    least, most = _least_ring(options.longest_tokens, options.spec), memory // 2
    if least > most:
        raise ConfigError(
            f"max_seq_len = {options.max_seq_len}: the longest sample needs {ROWS_IN_RING} x "
            f"{options.longest_tokens:,} tokens x {options.spec.bytes_per_token:,} bytes = {least:,} bytes of shared "
            f"memory, more than half of this engine's share of its node, {memory:,}; lower max_seq_len, or capture "
            "fewer layers"
        )
    return replace(options, ring_bytes=min(options.ring_bytes, most))


def node_memory() -> int:
    """Bytes of RAM of this machine, or of the container that this process is in."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups; the word "max"
            found.append(int(Path(limit).read_text()))
    return min(found)


def check_scratch(storage: Storage, need: int, min_free: int) -> None:
    """Raises ConfigError where the engines of this node could fill the folder in which they make their shards.

    Each unfinished shard would wait for room that only the others can give. need: bytes of all of them; min_free:
    `output.min_free_bytes`, which stay free beside them.
    """
    room = storage.scratch_room()
    if room is not None and room[1] < need + min_free:
        folder, free = room
        raise ConfigError(
            f"output.storage_options.scratch_dir = {folder}: shards are made there before they are uploaded; those of "
            f"this node's engines may need {need:,} bytes at once and output.min_free_bytes {min_free:,}, of which "
            f"{free:,} are free; choose a folder of a larger disk, or lower cluster.prefetch_units or, in another "
            "output, output.shard_bytes"
        )
