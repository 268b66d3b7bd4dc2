"""run.json, before an audit believes what it says. What readers need of it, `reader.output.load_run` has checked."""

from typing import Any

from hs_ray.errors import OutputError
from hs_ray.reader.output import load_run
from hs_ray.schema import RUN_JSON
from hs_ray.storage import Storage

NEEDED: dict[str, dict[str, type]] = {
    "model": {"name": str, "vocab_size": int},
    "plan": dict.fromkeys(("lines", "blank", "samples", "rejected", "units", "units_per_file"), int),
}


def read_run(storage: Storage) -> dict[str, Any]:
    """The content of run.json. Raises OutputError where there is none or it is another program's, ShardError where it
    is damaged."""
    run = load_run(storage)
    wrong = []
    for part, kinds in NEEDED.items():
        found = run.get(part)
        found = found if isinstance(found, dict) else {}
        wrong += [f"{part}.{name}" for name, kind in kinds.items() if type(found.get(name)) is not kind]
    if wrong:
        raise OutputError(
            f"output.path = {storage.root}: {RUN_JSON} is not one of hs_ray's, or damaged: no usable "
            f"{', '.join(wrong)} in it; check the path, or restore the file"
        )
    return run
