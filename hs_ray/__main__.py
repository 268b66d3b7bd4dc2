"""`python -m hs_ray extract KEY=VALUE ...`: the scripts of jobs/, from an installed wheel as from a clone."""

import runpy
import sys

from hs_ray.config import data_path

jobs = data_path("jobs")
names = sorted(path.stem for path in jobs.glob("[a-z]*.py"))
if len(sys.argv) < 2 or sys.argv[1] not in names:
    sys.exit(f"python -m hs_ray JOB [KEY=VALUE ...]; JOB is one of {', '.join(names)}")
script = str(jobs / f"{sys.argv[1]}.py")
sys.argv = [script, *sys.argv[2:]]
sys.path[0] = str(jobs)  # as `python jobs/JOB.py` has it
runpy.run_path(script, run_name="__main__")
