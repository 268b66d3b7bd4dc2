"""Bare engine, capture, capture + write, the whole job: tokens/s, and ratios to the bare engine, in one run."""

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import BenchJob, run_job


def main(job: BenchJob) -> int:
    from hs_ray.bench import timing
    from hs_ray.bench.planning import bench_plan
    from hs_ray.bench.reading import bench_read
    from hs_ray.bench.run import bench_rows, resolve_bench, workloads
    from hs_ray.engine import janitor

    if job.bench.plan_samples or job.bench.plan_chats:
        print(bench_plan(job))
        return 0
    if job.bench.read:
        print(bench_read(job))
        return 0
    setting = resolve_bench(job)
    prompts = workloads(job, setting.options.vocab_size)
    print(f"hs_ray: {job.model.path}, {setting.options.device}, {os.cpu_count()} CPUs, writing to {setting.folder}")
    rows = []
    print(timing.HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="hs_ray_bench-", dir=setting.folder) as folder:
        janitor.start(folder)  # a benchmark that is killed must not leave gigabytes in memory
        for row in bench_rows(job, replace(setting, folder=folder), prompts, Path(folder)):
            rows.append(row)  # each is shown and kept as soon as it is there: a run may be cut off
            print(timing.format_row(row), flush=True)
            if job.bench.json:
                Path(job.bench.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    rows.sort(key=lambda row: list(prompts).index(row.prompts))  # by what was sent, not by when it was timed
    print("\n".join([timing.HEAD, *map(timing.format_row, rows)]), flush=True)
    return 0


if __name__ == "__main__":
    run_job(BenchJob, "bench", main, checked=False)  # `plan.resolve` checks, with the model at hand
