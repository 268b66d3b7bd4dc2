"""`python -m hs_ray.prove.docs > docs/models.md`: the models that are known, and what was measured of them."""

import sys

from hs_ray.engine.models import NOT_ON_CPU, REFUSED, entry_for, supported
from hs_ray.engine.patching import known_releases
from hs_ray.prove.proofs import Proof, read_proofs

HEAD = """# Models

Made by `python -m hs_ray.prove.docs` from `hs_ray/engine/proofs.json`; do not edit.

A model class is captured only where its states were compared with those of transformers: a small random model of the
class (`hs_ray/prove/twin.py`), every layer id and both finals; prompts alone, together and in another order, split
over several forward passes, shared memory filled with NaN before use. An error is the root mean square over tokens of
`||x - x_fp32|| / ||x_fp32||`, where `x_fp32` is transformers in fp32 on the same device; it may be 1.5 times that of
transformers' own bf16 run (0.004 where that is smaller). A layer off by one, a residual or a norm left out, or a
single stale row is off by a tenth to one (`tests/unit/test_prove.py`).

How a class is captured: *native* and *setter* are SGLang's own aux states, *hook* a hook on each layer, *boundary* the
attention boundary of SGLang 0.5.23's layers (`hs_ray/engine/models.py`). Attention is SGLang's backend, where it was
noted; nothing that is captured depends on it.

A class in no row of the first table, or on another device, is proven on its first use there (`capture.prove=auto`), or
before by `python jobs/prove.py model.path=...`; `capture.prove=never` takes the risk. The devices are `cpu` and `cuda`:
a proof on one NVIDIA GPU is taken for all of them, and `jobs/prove.py` with `capture.prove=always` makes one on yours.

## Proven
"""

HEADINGS = ("class", "SGLang", "device", "attention", "captured by", "error by layer id", "pre-norm", "post-norm")
MEASURED = ("bf16 run", "worst token", "date")


def markdown() -> str:
    proofs = [proof for proof in read_proofs() if proof.in_force]
    parts = [HEAD, _proven(proofs), "", "## Known, and proven on first use", ""]
    parts += [_unproven(release, proofs) for release in known_releases()]
    parts += ["## Refused", "", "Every class that is named nowhere on this page, and these:", ""]
    parts += [f"- `{name}`: {reason}" for name, reason in sorted(REFUSED.items())]
    parts += ["", "SGLang does not run these on CPU:", ""]
    parts += [f"- `{name}`: {reason}" for name, reason in sorted(NOT_ON_CPU.items())]
    return "\n".join(parts) + "\n"


def _proven(proofs: list[Proof]) -> str:
    rows = [f"| {' | '.join(HEADINGS + MEASURED)} |", f"|{' --- |' * len(HEADINGS + MEASURED)}"]
    for proof in proofs:
        ids = {name: value for name, value in proof.errors.items() if name.startswith("hidden_")}
        by_id = " ".join(f"{name.removeprefix('hidden_')}:{value:.4f}" for name, value in ids.items())
        finals = [f"{proof.errors[name]:.4f}" for name in ("final_pre_norm", "final_post_norm")]
        device = f"{proof.versions.get('hardware', proof.device)}{', tp_size > 1' if proof.parallel else ''}"
        attention = proof.versions.get("attention", "")
        cells = [f"`{proof.architecture}`", proof.release, device, attention, proof.how, by_id, *finals]
        cells += [f"{max(proof.bf16_errors.values()):.4f}", f"{proof.worst_token:.3f}", proof.date]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _unproven(release: str, proofs: list[Proof]) -> str:
    lines = [f"SGLang {release}, by device:", ""]
    for device in ("cuda", "cpu"):
        done = {proof.architecture for proof in proofs if (proof.release, proof.device) == (release, device)}
        done |= set(NOT_ON_CPU) if device == "cpu" else set()
        rest = [f"`{name}` ({entry_for(name, release)})" for name in supported(release) if name not in done]
        lines.append(f"- {device}: {', '.join(rest) or 'none'}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(markdown())
