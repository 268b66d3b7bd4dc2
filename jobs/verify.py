"""Audit an output: exit 0 if nothing is wrong, 1 if something is, 2 if there is nothing to check.

python jobs/verify.py output.path=/nvme/hs                                           # integrity
python jobs/verify.py output.path=/nvme/hs verify.reference=hf verify.samples=16     # and values, against transformers
"""

from functools import partial

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import VerifyJob, run_job
from hs_ray.storage import open_storage
from hs_ray.verify import Report, verify_argmax, verify_integrity, verify_reference


def main(job: VerifyJob) -> int:
    path = str(job.output.path)
    storage = open_storage(path, job.output.storage_options)
    report = verify_integrity(storage, job.verify.incomplete, log=partial(print, flush=True))
    show("integrity", report)
    argmax = partial(verify_argmax, logprobs=job.verify.logprobs)
    reference = {"hf": verify_reference, "argmax": argmax}.get(job.verify.reference.value)
    if reference is not None:
        compared = reference(
            path,
            samples=job.verify.samples,
            seed=job.verify.seed,
            device=job.verify.device,
            incomplete=job.verify.incomplete,
            model_path=job.model_path,
            storage_options=job.output.storage_options,
        )
        print("\n".join(compared.table))
        show(f"reference {job.verify.reference.value}", compared)
        report.merge(compared)
    return 0 if report.ok else 1


def show(title: str, report: Report) -> None:
    print(f"{title}: {'ok' if report.ok else f'{len(report.problems)} problems'}")
    for line in report.lines():
        print(f"  {line}", flush=True)


if __name__ == "__main__":
    run_job(VerifyJob, "verify", main)
