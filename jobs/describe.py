"""Say what an output holds.

python jobs/describe.py output.path=/nvme/hs               # counts, layers, sizes, lengths, one sample's norms
python jobs/describe.py output.path=/nvme/hs report=true   # and a page about the run, _run/report.html
"""

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import DescribeJob, run_job
from hs_ray.describe import describe, text
from hs_ray.reader.output import find_shards, load_run
from hs_ray.report import write_report
from hs_ray.storage import open_storage


def main(job: DescribeJob) -> int:
    path = str(job.output.path)
    print(text(describe(path, job.output.storage_options)), flush=True)
    if job.report:
        storage = open_storage(path, job.output.storage_options)
        print(f"\nreport: {write_report(find_shards(storage, load_run(storage)))}", flush=True)
    return 0


if __name__ == "__main__":
    run_job(DescribeJob, "describe", main)
