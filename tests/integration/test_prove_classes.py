"""Real proofs on CPU: a twin through SGLang with capture, and through transformers. About a minute each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hs_ray.engine.patching import installed_release
from hs_ray.prove import prove
from hs_ray.prove.proofs import Key, read_proofs
from hs_ray.prove.request import Request
from hs_ray.prove.shapes import SHAPES

pytestmark = [pytest.mark.integration, pytest.mark.prove]

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "mixtral", "kimi_k25"])  # hook, setter, boundary, wrapper
def test_class_is_proven(name: str) -> None:
    proof = prove(Request(config=SHAPES[name], release=installed_release(), device="cpu"), LIMIT_S)
    assert proof.ok, "\n".join(proof.table)
    assert proof.in_force
    assert set(proof.errors) >= {"hidden_0", "hidden_4", "final_pre_norm", "final_post_norm"}
    assert all(0 < error < 0.1 for name, error in proof.errors.items() if name != "hidden_0")


def test_job_proves_a_folder_and_keeps_it(tiny_random: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "jobs/prove.py", f"model.path={tiny_random}", "engine.device=cpu"],
        cwd=ROOT,
        env={**os.environ, "HS_RAY_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final_post_norm" in done.stdout
    kept = read_proofs(next(tmp_path.glob("proofs/*.json")))
    assert [proof.key for proof in kept] == [Key("LlamaForCausalLM", installed_release(), "cpu", False)]
    assert json.loads((tiny_random / "config.json").read_text())["num_hidden_layers"] == 8  # the model is not touched


def test_leaves_nothing_behind(tmp_path: Path) -> None:
    """A proof that is ended half way: no process of its session, no twin."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HS_RAY_CACHE": str(tmp_path / "cache")}
    code = (
        "from hs_ray.prove import prove, ProofError\n"
        "from hs_ray.prove.request import Request\n"
        "from hs_ray.prove.shapes import SHAPES\n"
        "try:\n"
        f"    prove(Request(config=SHAPES['llama'], release={installed_release()!r}, device='cpu'), 12)\n"
        "except ProofError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "stopped after 12 s" in done.stdout
    assert [path for path in tmp_path.iterdir() if path.name.startswith("hs_ray-prove")] == []
