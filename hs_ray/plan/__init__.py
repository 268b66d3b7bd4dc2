"""The plan: job and model resolved, lines -> units, the estimate, and run.json.

- `resolved`: ResolvedJob, the fingerprint
- `build`: tables of lines -> units; `files`: the Parquet files they are written to
- `store`: reading them back, and run.json
- `estimates`: what a run will take, and the reasons to refuse it
"""

from hs_ray.plan.build import PlanSummary, build_plan
from hs_ray.plan.estimates import check_fits, check_rejected, estimate, format_estimate, measured_rate
from hs_ray.plan.resolved import ResolvedJob, collecting, differing_keys, fingerprint, resolve, without_weights
from hs_ray.plan.store import load_run, load_summary, read_unit, supersede, unit_counts, write_run

__all__ = [
    "PlanSummary",
    "ResolvedJob",
    "build_plan",
    "check_fits",
    "check_rejected",
    "collecting",
    "differing_keys",
    "estimate",
    "fingerprint",
    "format_estimate",
    "load_run",
    "load_summary",
    "measured_rate",
    "read_unit",
    "resolve",
    "supersede",
    "unit_counts",
    "without_weights",
    "write_run",
]
