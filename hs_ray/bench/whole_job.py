"""The whole job, `jobs/extract.py` over the same prompts, timed from its first unit's start to its last commit."""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hs_ray.bench.prompts import Prompts
from hs_ray.config import BenchJob, data_path
from hs_ray.manifest import list_markers
from hs_ray.schema import DONE, PROGRESS
from hs_ray.storage import Storage, open_storage


@dataclass(frozen=True)
class Timed:
    """Start-up (Ray, the engines, the canary) is left out: it does not grow with the input."""

    seconds: float
    waited_s: float  # of an engine, as in `timing.Row`
    idle_s: float


def run_whole_job(job: BenchJob, prompts: Prompts, folder: Path, device: str, replicas: str | int = "auto") -> Timed:
    """Raises CalledProcessError if the job does not end with 0."""
    source = folder / "prompts.jsonl"
    with source.open("w") as file:
        for prompt in prompts:
            file.write(json.dumps({"input_ids": prompt.tolist()}) + "\n")
    out = folder / "out"
    overrides = {
        "model.path": job.model.path,
        "input.path": source,
        "output.path": out,
        "max_seq_len": max(len(prompt) for prompt in prompts),
        "layers": job.layers if isinstance(job.layers, str) else list(job.layers),
        "capture.final": job.capture.final.value,
        "output.compression": job.output.compression.value,
        "output.shard_bytes": job.output.shard_bytes,
        "cluster.address": job.cluster.address,
        "cluster.prefetch_units": job.cluster.prefetch_units,
        "engine.device": device,
        "engine.tp_size": job.engine.tp_size,
        "engine.replicas": replicas,
        **{f"engine.{key}": getattr(job.engine, key) for key in ("chunked_prefill_size", "mem_fraction_static")},
        "engine.attention_backend": job.engine.attention_backend,
    }
    words = [f"{key}={value}" for key, value in overrides.items() if value is not None]
    words += [f"+engine.args.{key}={value}" for key, value in job.engine.args.items()]
    subprocess.run([sys.executable, str(data_path("jobs") / "extract.py"), *words], check=True)
    storage = open_storage(str(out))
    seconds = _seconds(storage)
    engines = [engine for info in storage.list(PROGRESS) for engine in _engines(storage, info.path)]
    waited, busy = (statistics.mean(engine[key] for engine in engines) for key in ("waited_s", "busy_s"))
    return Timed(seconds, waited, max(0.0, seconds - busy))


def _engines(storage: Storage, path: str) -> list[dict[str, float]]:
    return list(json.loads(storage.read_bytes(path))["by_engine"].values())


def _seconds(storage: Storage) -> float:
    """From the start of the earliest unit to the last marker."""
    committed = {info.path: info.mtime for info in storage.list(DONE)}
    markers = [marker for marker in list_markers(storage).values() if marker is not None]
    ends = {marker.unit: committed[f"{DONE}/unit-{marker.unit:06d}.json"] for marker in markers}
    return max(ends.values()) - min(ends[marker.unit] - marker.seconds for marker in markers)
