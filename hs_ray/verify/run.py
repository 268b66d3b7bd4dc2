"""run.json, before anything is believed that it says: every audit and every reader of a whole output begins with it."""

from collections.abc import Mapping
from typing import Any

from hs_ray.errors import OutputError
from hs_ray.reader.output import load_run
from hs_ray.schema import FINAL_CHOICES, RUN_JSON
from hs_ray.storage import Storage

NEEDED: dict[str, type] = {
    "fingerprint": str,
    "config.output.compression": str,
    "model.name": str,
    "model.vocab_size": int,
    "spec.layers": list,
    "spec.final": str,
    "spec.num_hidden_layers": int,
    "spec.hidden_size": int,
    "plan.lines": int,
    "plan.blank": int,
    "plan.samples": int,
    "plan.rejected": int,
    "plan.units": int,
    "plan.units_per_file": int,
}


def read_run(storage: Storage) -> dict[str, Any]:
    """The content of run.json. Raises OutputError where there is none or it is another program's, ShardError where it
    is damaged."""
    run = load_run(storage)
    wrong = [name for name, kind in NEEDED.items() if not isinstance(_at(run, name), kind)]
    if not wrong:
        layers = run["spec"]["layers"]
        if not all(isinstance(layer, dict) and isinstance(layer.get("id"), int) for layer in layers):
            wrong = ["spec.layers"]
        elif run["spec"]["final"] not in FINAL_CHOICES:
            wrong = ["spec.final"]
    if wrong:
        raise OutputError(
            f"output.path = {storage.root}: {RUN_JSON} is not one of hs_ray's, or damaged: no usable "
            f"{', '.join(wrong)} in it; check the path, or restore the file"
        )
    return run


def _at(run: Mapping[str, Any], name: str) -> Any:
    """The value of `a.b.c`; None where there is none."""
    found: Any = run
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
