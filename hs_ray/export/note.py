"""The note beside an export's files: what they are made from, and whether what is there is the same."""

import json
from pathlib import Path
from typing import Any

from hs_ray.errors import OutputError
from hs_ray.export.common import Exporter, write_whole
from hs_ray.reader import Output, load_final_norm
from hs_ray.weights import norm_digest

NOTE = "hs_ray_export.json"  # beside the data: whose it is, and the layers in the trainer's spelling


def make_note(exporter: Exporter, output: Output) -> dict[str, Any]:
    """What the files of an export are made from: another output, or the same one extracted anew, differs in it."""
    return {
        "target": exporter.name,
        "fingerprint": output.fingerprint,
        "shards": [{"unit": shard.unit, "samples": shard.samples, "sha256": shard.sha256} for shard in output.shards],
        "model": exporter.model,
        "samples": output.samples,
        "tokens": output.tokens,
        "final": exporter.norm,
        "final_norm": _norm_in_use(exporter, output),
        "layer_ids": list(exporter.choice.layers),
        "output_of_layers": exporter.choice.outputs_of,
        exporter.name: exporter.layers_note(),
        "draft_vocab_size": None,
        "complete": False,
    }


def _norm_in_use(exporter: Exporter, output: Output) -> str | None:
    """The digest of the final norm that the files are made with; None where they need none."""
    if not exporter.needs_norm:
        return None
    norm = load_final_norm(output.storage)
    return norm_digest(norm.weight, norm.eps, norm.kind)


def write_note(folder: Path, note: dict[str, Any]) -> None:
    write_whole(folder, NOTE, lambda file: file.write_text(json.dumps(note, indent=1)))


def check_same(target: Path, note: dict[str, Any], draft_vocab_size: int | None) -> int | None:
    """What is in the folder was made from the very same shards, so its files need not be made again.

    Returns the size of the draft vocabulary whose mapping is there, None for none.
    """
    advice = "choose another folder, or remove this one"
    try:
        old = json.loads((target / NOTE).read_bytes())
    except (OSError, ValueError) as error:
        raise OutputError(f"export.path = {target}: {NOTE} cannot be read ({error}); {advice}") from None
    if not isinstance(old, dict):
        raise OutputError(f"export.path = {target}: {NOTE} is no note of ours; {advice}")
    for name in ("target", "fingerprint"):
        if old.get(name) != note[name]:
            raise OutputError(f"export.path = {target}: holds another export ({name} differs); {advice}")
    _check_shards(target, old, note, advice)
    if old.get("final_norm", note["final_norm"]) != note["final_norm"]:  # earlier releases did not note it
        raise OutputError(f"export.path = {target}: holds an export made with another final norm; {advice}")
    mapping: int | None = old.get("draft_vocab_size")
    if mapping not in (None, draft_vocab_size):  # where there is none, one is added
        raise OutputError(
            f"export.path = {target}: holds another export (with export.draft_vocab_size={mapping}); "
            f"give the same, {advice}"
        )
    return mapping


def _check_shards(target: Path, old: dict[str, Any], note: dict[str, Any], advice: str) -> None:
    if "shards" not in old:
        raise OutputError(
            f"export.path = {target}: was begun by an earlier release, which did not note the shards that its files "
            "are made from; remove it and export again"
        )
    if old["shards"] != note["shards"]:
        raise OutputError(
            f"export.path = {target}: holds another export (its shards are others: the output was extracted anew or "
            f"has grown); {advice}"
        )
