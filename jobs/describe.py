"""Say what an output holds.

python jobs/describe.py output.path=/nvme/hs               # counts, layers, sizes, lengths, one sample's norms
python jobs/describe.py output.path=/nvme/hs report=true   # the same as a page, report.html in the output
"""

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import DescribeJob, run_job
from hs_ray.describe import REPORT, describe, html, text
from hs_ray.storage import open_storage


def main(job: DescribeJob) -> int:
    path = str(job.output.path)
    description = describe(path, job.output.storage_options)
    print(text(description), flush=True)
    if job.report:
        storage = open_storage(path, job.output.storage_options)
        storage.write(REPORT, html(description).encode())
        print(f"\nreport: {storage.root}/{REPORT}", flush=True)
    return 0


if __name__ == "__main__":
    run_job(DescribeJob, "describe", main)
