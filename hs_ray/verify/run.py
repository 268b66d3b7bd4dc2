"""run.json, before an audit believes what it says."""

from typing import Any

from hs_ray.reader.output import load_run
from hs_ray.storage import Storage

NEEDED: dict[str, type] = {
    "model.name": str,
    "model.vocab_size": int,
    **{f"plan.{name}": int for name in ("lines", "blank", "samples", "rejected", "units", "units_per_file")},
}


def read_run(storage: Storage) -> dict[str, Any]:
    """The content of run.json. Raises OutputError where there is none or it is another program's, ShardError where it
    is damaged."""
    return load_run(storage, NEEDED)
