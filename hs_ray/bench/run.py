"""From a BenchJob to rows: what is timed, on what, in which order."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hs_ray.bench import prompts, timing
from hs_ray.bench.prompts import Prompts
from hs_ray.bench.timing import Row
from hs_ray.bench.ways import Bare, Capture, CaptureWrite, Setting, Transformers, Way
from hs_ray.bench.whole_job import run_whole_job
from hs_ray.config import BenchJob
from hs_ray.engine import patching
from hs_ray.engine.arguments import check_arguments
from hs_ray.engine.options import EngineOptions
from hs_ray.model import local_weights
from hs_ray.pipeline.resources import engine_options, fit_ring, node_memory, units_at_once
from hs_ray.plan import resolve

WARM_TOKENS = 2  # times the chunk: kernels compiled, memory touched, before anything is timed


def resolve_bench(job: BenchJob) -> Setting:
    """The engine's options for the longest prompt, and where to write."""
    resolved = resolve(job)
    longest = max([*job.bench.prompt_tokens, job.max_seq_len if job.bench.mix else 1])
    patch = patching.check_installed()
    check_arguments(job.engine.args)
    options = fit_ring(engine_options(resolved, patch.release, _device(job), longest), node_memory())
    options = EngineOptions(**{**vars(options), "model_path": local_weights(resolved.model)})
    compression = job.output.compression.value
    return Setting(options, job.bench.path or "/dev/shm", units_at_once(job), resolved.unit_tokens, compression)


def _device(job: BenchJob) -> str:
    if job.engine.device != "auto":
        return job.engine.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def workloads(job: BenchJob, vocab_size: int) -> dict[str, Prompts]:
    made = {
        f"{length} tokens": prompts.equal(length, job.bench.tokens, vocab_size, seed=1)
        for length in job.bench.prompt_tokens
    }
    if job.bench.mix:
        made["mixed"] = prompts.mixed(job.bench.tokens, vocab_size, job.max_seq_len, seed=1)
    return made


def bench_rows(job: BenchJob, setting: Setting, work: Mapping[str, Prompts], folder: Path) -> Iterator[Row]:
    """All that `job.bench` asks for. folder: for the whole job's inputs and outputs."""
    if job.bench.replicas:
        yield from _replicas_rows(job, setting, work, folder)
        return
    bare: dict[str, float] = {}
    for row in _engine_ways(job, setting, work):
        bare.setdefault(row.prompts, row.tokens_per_s)  # the first way
        yield row
    if job.bench.whole_job:
        for label, prompts in work.items():
            yield _whole_job(job, setting, label, "whole job", prompts, folder, bare[label])


def _engine_ways(job: BenchJob, setting: Setting, work: Mapping[str, Prompts]) -> Iterator[Row]:
    """Every way in its own process; all of them up at once and timed in turn, or one after the other."""
    makers: dict[str, Callable[[Setting], Way]] = {
        "bare engine": Bare,
        "capture": Capture,
        "capture + write": CaptureWrite,
        **({"transformers + save": Transformers} if job.bench.transformers else {}),
    }
    options = setting.options
    together = options.device == "cpu" if job.bench.side_by_side is None else job.bench.side_by_side
    groups = [makers] if together else [{name: maker} for name, maker in makers.items()]
    yardsticks: dict[str, float] = {}
    for group in groups:
        with _started(group, setting) as processes:
            yield from timing.compare(processes, work, job.bench.repeats, options.spec.bytes_per_token, yardsticks)


@contextlib.contextmanager
def _started(makers: Mapping[str, Callable[[Setting], Way]], setting: Setting) -> Iterator[dict[str, timing.Process]]:
    options = setting.options
    warm = prompts.equal(min(512, options.max_seq_len), WARM_TOKENS * max(options.chunk, 1), options.vocab_size, seed=0)
    processes = {name: timing.Process(maker, setting) for name, maker in makers.items()}  # they start side by side
    try:
        for process in processes.values():
            process.wait()
        for process in processes.values():
            process.time(warm)
        yield processes
    finally:
        for process in processes.values():
            process.close()


def _replicas_rows(job: BenchJob, setting: Setting, work: Mapping[str, Prompts], folder: Path) -> Iterator[Row]:
    """The whole job with each of `bench.replicas` engines, each on as many times the prompts.

    The ratio is to the first number's rate per engine: 1 would be linear.
    """
    for label, chosen in work.items():
        per_engine = 0.0
        for count in job.bench.replicas:
            way = f"whole job, {count} {'engine' if count == 1 else 'engines'}"
            row = _whole_job(job, setting, label, way, chosen * count, folder, per_engine * count, count)
            per_engine = per_engine or row.tokens_per_s / count
            yield row


def _whole_job(
    job: BenchJob,
    setting: Setting,
    label: str,
    way: str,
    prompts: Prompts,
    folder: Path,
    yardstick: float,
    replicas: str | int = "auto",
) -> Row:
    """yardstick: tokens/s that the ratio is to; 0: this row is the yardstick."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        timed = run_whole_job(job, prompts, Path(place), setting.options.device, replicas)
    rate = sum(len(prompt) for prompt in prompts) / timed.seconds
    gb_per_s = rate * setting.options.spec.bytes_per_token / 1e9
    return Row(label, way, rate, rate / (yardstick or rate), gb_per_s, 0.0, timed.waited_s, timed.idle_s)
