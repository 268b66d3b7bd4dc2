"""JSONL in, hidden states out. `python jobs/extract.py --help` lists every key."""

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import ExtractJob, run_job


def main(job: ExtractJob) -> int:
    from hs_ray.pipeline.driver import run

    return run(job)


if __name__ == "__main__":
    run_job(ExtractJob, "extract", main, checked=False)  # `plan.resolve` checks, with the model at hand
