"""`_run/run.json` as a reader believes it: what was run, what was captured, and where its shards are."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hs_ray.errors import OutputError, ShardError
from hs_ray.schema import FINAL_CHOICES, FORMAT_VERSION, RUN_JSON, CaptureSpec
from hs_ray.storage import PerNodeStorage, Storage, raise_outage

# What a reader believes of run.json. bool is no int here: JSON tells them apart.
NEEDED: dict[str, type] = {
    "fingerprint": str,
    "config.output.compression": str,
    "spec.layers": list,
    "spec.final": str,
    "spec.num_hidden_layers": int,
    "spec.hidden_size": int,
}


def load_json(storage: Storage, path: str) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no file. Raises ShardError for anything else in it."""
    if not storage.exists(path):
        return None
    try:
        content = json.loads(storage.read_bytes(path))
    except ValueError as error:
        raise ShardError(f"{storage.root}/{path}: damaged, not JSON ({error})") from None
    except IsADirectoryError:
        raise ShardError(f"{storage.root}/{path}: a folder where a file should be") from None
    if not isinstance(content, dict):
        raise ShardError(f"{storage.root}/{path}: damaged, not a JSON object")
    return content


def load_run(storage: Storage, also: Mapping[str, type] | None = None) -> dict[str, Any]:
    """`_run/run.json`. Raises OutputError if this is no output of hs_ray, or not ours to read; ShardError if the file
    is no JSON.

    also: what the caller believes of it beyond what readers need.
    """
    try:
        run = load_json(storage, RUN_JSON)
    except OSError as error:
        raise_outage(error)
        raise OutputError(
            f"output.path = {storage.root}: {RUN_JSON} there cannot be read ({error.strerror}); check the path, and "
            "the rights to what is in it"
        ) from None
    if run is None:
        raise OutputError(
            f"output.path = {storage.root}: no {RUN_JSON} there, so this is not an output of hs_ray; check the path"
        )
    if isinstance(run, dict) and run.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise OutputError(
            f"output.path = {storage.root}: {RUN_JSON} has format {run['format_version']}, this hs_ray reads "
            f"{FORMAT_VERSION}; read it with the release that made it"
        )
    wrong = [name for name, kind in (NEEDED | dict(also or {})).items() if type(value_at(run, name)) is not kind]
    if not wrong:  # the spec is there
        spec = run["spec"]
        ids = [layer.get("id") if isinstance(layer, dict) else None for layer in spec["layers"]]
        wrong += ["spec.layers"] if any(type(i) is not int for i in ids) else []
        wrong += ["spec.final"] if spec["final"] not in FINAL_CHOICES else []
    if wrong:
        raise damaged_run(storage, wrong)
    return run


def damaged_run(storage: Storage, wrong: Sequence[str]) -> OutputError:
    """What to raise for a run.json without these."""
    return OutputError(
        f"output.path = {storage.root}: {RUN_JSON} is not one of hs_ray's, or damaged: no usable {', '.join(wrong)} in "
        "it; check the path, or restore the file"
    )


def value_at(run: Any, name: str, missing: Any = None) -> Any:
    """The value of `a.b.c`; `missing` where there is none."""
    for key in name.split("."):
        run = run.get(key, missing) if isinstance(run, Mapping) else missing
    return run


def find_shards(storage: Storage, run: Mapping[str, Any]) -> Storage:
    """The storage that sees this node's shards too, where the run left them on each node's own disk."""
    node_path = run["config"]["output"].get("node_path")
    if not node_path or isinstance(storage, PerNodeStorage):
        return storage
    return PerNodeStorage(storage, node_path)


def run_spec(run: Mapping[str, Any]) -> CaptureSpec:
    """What a run captured, out of run.json or out of a shard's metadata."""
    spec = run.get("spec", run)
    layers = tuple(layer["id"] for layer in spec["layers"])
    return CaptureSpec(layers, spec["final"], spec["num_hidden_layers"], spec["hidden_size"])
