"""run.json, before an audit believes what it says: against itself, and against the markers."""

import json
from collections.abc import Mapping
from typing import Any

from hs_ray.errors import ConfigError

# What a start compares with run.json; an audit must not have another idea of it.
from hs_ray.plan.resolved import NEUTRAL_ENGINE_ARGS, digest
from hs_ray.reader.run import load_run, run_spec, value_at
from hs_ray.schema import RUN_JSON, Marker, layer_spellings, resolve_layers
from hs_ray.storage import Storage
from hs_ray.verify.report import Report

NEEDED: dict[str, type] = {
    "model.name": str,
    "model.vocab_size": int,
    **{f"plan.{name}": int for name in ("lines", "blank", "samples", "rejected", "units", "units_per_file")},
}
# Part of the fingerprint -> where run.json says the same. Three more are lists or objects, see `_facts`.
PARTS = {
    "format_version": "format_version",
    "model.path": "model.digest",
    "capture.final": "spec.final",
    "sglang": "versions.sglang",
    "patches/sglang": "versions.patch",
    "engine/models": "versions.capture",
    "model.dtype": "config.model.dtype",
    "max_seq_len": "config.max_seq_len",
    "on_too_long": "config.on_too_long",
    "input.id_key": "config.input.id_key",
    "input.limit": "config.input.limit",
    "input.allow_empty_mask": "config.input.allow_empty_mask",
    "output.compression": "config.output.compression",
}


def read_run(storage: Storage) -> dict[str, Any]:
    """The content of run.json. Raises OutputError where there is none or it is another program's, ShardError where it
    is damaged."""
    return load_run(storage, NEEDED)


def fact(run: Any, name: str) -> Any:
    """The value of `a.b.c`; Ellipsis where there is none: None is a value."""
    return value_at(run, name, missing=...)


def check_run(run: dict[str, Any], markers: Mapping[int, Marker], report: Report) -> dict[str, Any]:
    """run.json for the checks to come: with the fingerprint and the spellings of layers that it should have."""
    parts = run.get("fingerprint_parts")
    _check_spec(run, report)
    if parts is not None:
        _check_parts(run, parts, report)
    spec = run["spec"] | {"layers": layer_spellings(run_spec(run).layers)}
    return run | {"spec": spec, "fingerprint": _fingerprint(run, parts, markers, report)}


def _fingerprint(run: dict[str, Any], parts: Any, markers: Mapping[int, Marker], report: Report) -> str:
    """The one to compare everything with: that of all markers, where it is run.json that says another.

    Else one damaged string would be told as damage of every marker and every shard.
    """
    told: str = run["fingerprint"]
    theirs = {marker.fingerprint for marker in markers.values()}
    common = theirs.pop() if len(theirs) == 1 else None
    computed = digest(parts) if parts and isinstance(parts, dict) else told  # older outputs: none, or empty
    if computed != told:
        detail = f"fingerprint is {told[:16]}..., that of its fingerprint_parts is {computed[:16]}..."
        report.add("fingerprint", RUN_JSON, detail)
        return computed if common == computed else told
    if common not in (None, told) and len(markers) > 1:
        detail = f"is {told[:16]}..., all {len(markers)} markers have {str(common)[:16]}...: of another run, or damaged"
        report.add("fingerprint", RUN_JSON, detail)
        return str(common)
    return told


def _check_parts(run: dict[str, Any], parts: Any, report: Report) -> None:
    """The parts of the fingerprint against what else run.json says; a fact that is not in it is of an older run."""
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        report.add("run", RUN_JSON, f"fingerprint_parts is {parts!r:.80}, not an object of texts")
        return
    for name, value in _facts(run).items():
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        if parts.get(name, text) != text:
            report.add("run", RUN_JSON, f"fingerprint_parts has {name} = {parts[name]:.80}, elsewhere it is {text:.80}")


def _facts(run: dict[str, Any]) -> dict[str, Any]:
    """The parts of the fingerprint, as far as the rest of run.json tells them."""
    found = {part: fact(run, name) for part, name in PARTS.items()}
    found["layers"] = [layer["id"] for layer in run["spec"]["layers"]]
    formats = [fact(source, "format") for source in run.get("sources") or ()]
    if formats and ... not in formats:
        found["input.format"] = formats
    if isinstance(arguments := fact(run, "config.engine.args"), dict):
        named = arguments.items()
        found["engine.args"] = {key: v for key, v in named if key.replace("-", "_") not in NEUTRAL_ENGINE_ARGS}
    return {part: value for part, value in found.items() if value is not ...}


def _check_spec(run: dict[str, Any], report: Report) -> None:
    """What was captured: against the model, the configuration and itself."""
    spec, told = run_spec(run), run["spec"]
    for name in ("num_hidden_layers", "hidden_size"):
        if (of_model := fact(run, f"model.{name}")) not in (..., told[name]):
            report.add("run", RUN_JSON, f"spec.{name} is {told[name]}, model.{name} is {of_model!r:.80}")
    wanted: dict[str, Any] = {"layers": layer_spellings(spec.layers), "columns": list(spec.columns)}
    if (asked := fact(run, "config.layers")) is not ...:
        try:
            wanted["layers"] = layer_spellings(resolve_layers(asked, spec.num_hidden_layers))
        except ConfigError as error:
            report.add("run", RUN_JSON, f"config.{error}")
    if (final := fact(run, "config.capture.final")) is not ...:
        wanted["final"] = final
    for name, value in wanted.items():
        if told.get(name, value) != value:
            report.add("run", RUN_JSON, f"spec.{name} is {told[name]!r:.200}, it should be {value!r:.200}")
    if asked is ... and list(spec.layers) != [i for i in range(spec.num_hidden_layers + 1) if i in spec.layers]:
        report.add("run", RUN_JSON, f"spec.layers are {list(spec.layers)}: not ascending ids from 0 to the last layer")
