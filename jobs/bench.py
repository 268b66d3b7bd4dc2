"""Bare engine, capture, capture + write, the whole job: tokens/s, and ratios to the bare engine, in one run."""

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import BenchJob, run_job

if TYPE_CHECKING:
    from hs_ray.bench.timing import Row


def _printed(rows: Iterable["Row"]) -> list["Row"]:
    """The rows, each printed as soon as it is there."""
    from hs_ray.bench import timing

    print(timing.HEAD, flush=True)
    made = []
    for row in rows:
        print(timing.format_row(row), flush=True)
        made.append(row)
    return made


def main(job: BenchJob) -> int:
    from hs_ray.bench import timing
    from hs_ray.bench.planning import bench_plan
    from hs_ray.bench.reading import bench_read
    from hs_ray.bench.run import engine_ways, resolve_bench, whole_job_rows, workloads

    if job.bench.plan_samples or job.bench.plan_chats:
        print(bench_plan(job))
        return 0
    if job.bench.read:
        print(bench_read(job))
        return 0
    setting = resolve_bench(job)
    prompts = workloads(job, setting.options.vocab_size)
    print(f"hs_ray: {job.model.path}, {setting.options.device}, {os.cpu_count()} CPUs, writing to {setting.folder}")
    rows = _printed(engine_ways(job, setting, prompts))
    if job.bench.whole_job:
        with tempfile.TemporaryDirectory(prefix="hs_ray_bench-", dir=setting.folder) as folder:
            rows += _printed(whole_job_rows(job, setting, prompts, Path(folder), rows))
        print("\n".join([timing.HEAD, *map(timing.format_row, rows)]), flush=True)
    if job.bench.json:
        Path(job.bench.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    run_job(BenchJob, "bench", main, checked=False)  # `plan.resolve` checks, with the model at hand
