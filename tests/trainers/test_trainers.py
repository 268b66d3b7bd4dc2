"""Exports are what the trainers' own published code reads, trains on and makes a drafter of.

`make test-trainers` makes an environment a trainer (their pins clash) and runs this. The states are SmolLM2's, over its
own greedy answers: the trainer's head over our final state must choose the next token (a few ties in bf16 aside), and
with the wrong norm it must not. That proves the final state alone; layers are proven by `verify.reference=hf`.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SAMPLES, HIDDEN, DRAFT_VOCAB = 8, 576, 256
LAYER_IDS = [2, 15, 27]
TRAINERS = ("speculators", "specforge", "modelopt")
# Tensors that SGLang's drafter takes, in the names that each trainer's checkpoint has.
DRAFTER = {
    "speculators": {"fc.weight", "lm_head.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", "d2t", "t2d"},
    "specforge": {"fc.weight", "lm_head.weight", "norm.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d"},
    "modelopt": {"fc.weight", "lm_head.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", "d2t"},
}
_LAYER = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.qkv_proj", "self_attn.o_proj")
DRAFTER_IN_SGLANG = {
    "lm_head.weight",
    "model.fc.weight",
    "model.norm.weight",
    *(f"model.layers.0.{name}.weight" for name in (*_LAYER, "mlp.gate_up_proj", "mlp.down_proj")),
}

pytestmark = pytest.mark.trainers


def run(*command: Any) -> None:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole job over the greedy answers, on the real engine."""
    path = tmp_path_factory.mktemp("trainers") / "out"
    quick = ["max_seq_len=256", "engine.chunked_prefill_size=128", "capture.prove=never"]  # a short canary, no proof
    keys = ["layers=eagle3", "capture.final=pre_norm", "cluster.address=local", *quick]
    run(sys.executable, "jobs/extract.py", f"input.path={HERE}/greedy.jsonl", f"output.path={path}", *keys)
    return path


@pytest.fixture(scope="session", params=TRAINERS)
def checked(request: pytest.FixtureRequest, output: Path, smollm2: Path) -> dict[str, Any]:
    """What the trainer's code found in our export; see check.py."""
    name: str = request.param
    python = ROOT / ".venvs" / name / "bin/python"
    if not python.exists():
        pytest.skip(f"no environment of {name}; `make test-trainers` makes it")
    export, result = output.parent / name, output.parent / f"{name}-result"
    keys = [f"export.to={name}", f"export.path={export}", f"export.draft_vocab_size={DRAFT_VOCAB}"]
    run(sys.executable, "jobs/export.py", f"output.path={output}", *keys)
    run(python, HERE / f"check_{name}.py", smollm2, export, result)
    found: dict[str, Any] = json.loads((result / "result.json").read_text())
    print(f"\n{name}: {', '.join(' '.join(item) for item in found['versions'].items())}")
    print(f"  right norm {found['right']:.1%}, wrong norm {found['wrong']:.1%}")
    print(
        f"  losses {' '.join(f'{loss:.2f}' for loss in found['losses'][::5])} ... {found['losses'][-1]:.2f}", flush=True
    )
    return found | {"trainer": name, "drafter": result / "drafter"}


def test_its_reader_takes_every_sample(checked: dict[str, Any]) -> None:
    assert checked["samples"] == SAMPLES and not checked["unreadable"]
    assert checked["shape"] == [3 * HIDDEN]
    assert checked["vocabulary"], "our draft vocabulary is not the one that the trainer makes of our token counts"


def test_its_head_chooses_the_next_token(checked: dict[str, Any]) -> None:
    assert checked["right"] >= 0.95
    assert checked["wrong"] < 0.60


def test_the_loss_of_thirty_steps_falls(checked: dict[str, Any]) -> None:
    losses = checked["losses"]
    assert len(losses) == 30 and all(loss == loss for loss in losses)
    assert losses[-1] < losses[0] / 2


def test_its_drafter_has_what_sglang_loads(checked: dict[str, Any]) -> None:
    folder = checked["drafter"]
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        assert set(tensors.keys()) >= DRAFTER[checked["trainer"]]
        assert tensors.get_slice("fc.weight").get_shape() == [HIDDEN, 3 * HIDDEN]
        assert tensors.get_slice("lm_head.weight").get_shape() == [DRAFT_VOCAB, HIDDEN]


def test_sglang_loads_the_whole_drafter(checked: dict[str, Any], smollm2: Path, tmp_path: Path) -> None:
    """Every parameter that SGLang's drafter has, against the checkpoint; the embeddings are the target's."""
    folder = checked["drafter"]
    config = json.loads((folder / "config.json").read_text())
    if checked["trainer"] == "speculators":
        (folder / "config.json").write_text(json.dumps(for_sglang(config)))
    run(sys.executable, HERE / "load_drafter.py", smollm2, folder, tmp_path / "loaded.json")
    loaded = json.loads((tmp_path / "loaded.json").read_text())
    expected: dict[str, float] = defaultdict(float)
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # not a dict
            expected[name_in_sglang(name)] += tensors.get_tensor(name).double().sum().item()
        draft_ids = (tensors.get_tensor("d2t") + torch.arange(DRAFT_VOCAB)).tolist()
    sums = {name: total for name, total in loaded["sums"].items() if "embed_tokens" not in name}
    assert sums.keys() == DRAFTER_IN_SGLANG | ({"model.input_norm.weight"} if config.get("norm_before_fc") else set())
    assert sums == pytest.approx({name: expected[name] for name in sums}, rel=1e-6, abs=1e-3)
    assert loaded["draft_ids"] == draft_ids


def for_sglang(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of speculators, which has no export of its own, as SGLang's drafter reads it."""
    layer = config["transformer_layer_config"]
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_output": config["norm_output"],
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYER_IDS],
            "use_aux_hidden_state": True,
            "norm_before_fc": config["norm_before_fc"],
        },
    }


def name_in_sglang(name: str) -> str:
    """Of the parameter that a tensor of a checkpoint goes into."""
    name = name.replace("midlayer.", "layers.0.")
    name = re.sub(r"\b[qkv]_proj\b", "qkv_proj", re.sub(r"\b(gate|up)_proj\b", "gate_up_proj", name))
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
