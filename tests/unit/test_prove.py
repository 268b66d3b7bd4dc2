"""The comparison fails every sabotage; twins keep what decides the path; proofs are found, kept and enforced.

Without an engine: a twin's bf16 run stands for ours. tests/integration/test_prove_classes.py starts engines.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hs_ray.engine.models import entry_for
from hs_ray.errors import UnsupportedError
from hs_ray.prove import docs, run
from hs_ray.prove.compare import compare, table, token_errors
from hs_ray.prove.measure import make_prompts, reference_states, spec_of
from hs_ray.prove.proofs import Key, Proof, add_proofs, cached_path, find_proof, read_proofs
from hs_ray.prove.reference import Reference, load_model
from hs_ray.prove.request import Request
from hs_ray.prove.shapes import SHAPES
from hs_ray.prove.twin import make_twin

ROOT = Path(__file__).parents[2]


LAYERS = 4


LONG = -1  # index of the longest prompt


class Twin:
    """A twin's states in fp32 and bf16."""

    def __init__(self, name: str, folder: Path):
        self.request = Request(config=SHAPES[name], release="0.5.23", device="cpu")
        self.folder = folder
        self.spec = spec_of(make_twin(self.request.config, folder))
        self.prompts = make_prompts(0)
        self.truth, self.bf16 = reference_states(self.request, folder, self.spec, self.prompts)

    def failed(self, ours: list[dict[str, Any]]) -> set[str]:
        """Columns that do not pass."""
        return {r.column for r in compare(ours, self.truth, self.bf16, self.spec.columns) if not r.ok}

    def copy(self) -> list[dict[str, Any]]:
        return [{name: state.copy() for name, state in prompt.items()} for prompt in self.bf16]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(request.param, tmp_path_factory.mktemp(request.param))


STATES = {f"hidden_{i}" for i in range(LAYERS + 1)} | {"final_pre_norm", "final_post_norm"}


def shift_down(ours: list[dict[str, Any]]) -> set[str]:
    """The state one layer early."""
    for states in ours:
        for i in range(LAYERS, 0, -1):
            states[f"hidden_{i}"] = states[f"hidden_{i - 1}"]
    return {f"hidden_{i}" for i in range(1, LAYERS + 1)}


def shift_up(ours: list[dict[str, Any]]) -> set[str]:
    for states in ours:
        for i in range(LAYERS):
            states[f"hidden_{i}"] = states[f"hidden_{i + 1}"]
    return {f"hidden_{i}" for i in range(LAYERS)}


def drop_residual(ours: list[dict[str, Any]]) -> set[str]:
    """What the layer added, without what came in; as SGLang 0.5.23 does natively for Gemma 3."""
    for states in ours:
        for i in range(LAYERS, 0, -1):
            states[f"hidden_{i}"] = states[f"hidden_{i}"] - states[f"hidden_{i - 1}"]
        states["final_pre_norm"] = states[f"hidden_{LAYERS}"]
    return {f"hidden_{i}" for i in range(2, LAYERS + 1)} | {"final_pre_norm"}


def residual_twice(ours: list[dict[str, Any]]) -> set[str]:
    for states in ours:
        for i in range(LAYERS, 0, -1):
            states[f"hidden_{i}"] = states[f"hidden_{i}"] + states[f"hidden_{i - 1}"]
    return {f"hidden_{i}" for i in range(1, LAYERS + 1)}


def drop_norm(ours: list[dict[str, Any]]) -> set[str]:
    for states in ours:
        states["final_post_norm"] = states["final_pre_norm"]
    return {"final_post_norm"}


def norm_too_early(ours: list[dict[str, Any]]) -> set[str]:
    for states in ours:
        states["final_pre_norm"] = states["final_post_norm"]
    return {"final_pre_norm"}


def norm_without_weight(ours: list[dict[str, Any]]) -> set[str]:
    for states in ours:
        x = states["final_pre_norm"]
        states["final_post_norm"] = x / np.sqrt((x**2).mean(axis=1, keepdims=True))
    return {"final_post_norm"}


def swap_two_rows(ours: list[dict[str, Any]]) -> set[str]:
    for name in ours[LONG]:
        ours[LONG][name][[7, 8]] = ours[LONG][name][[8, 7]]
    return STATES


def rows_one_off(ours: list[dict[str, Any]]) -> set[str]:
    """Every row of one prompt one place later, as with a wrong row offset."""
    for name in ours[LONG]:
        ours[LONG][name] = np.roll(ours[LONG][name], 1, axis=0)
    return STATES


def row_of_another_prompt(ours: list[dict[str, Any]]) -> set[str]:
    """A stale slot: one row is that of an earlier request."""
    for name in ours[LONG]:
        ours[LONG][name][200] = ours[LONG - 1][name][17]
    return STATES


def second_chunk_stale(ours: list[dict[str, Any]]) -> set[str]:
    for name in ours[LONG]:
        ours[LONG][name][128:256] = ours[LONG][name][:128]
    return STATES


def poisoned_slot(ours: list[dict[str, Any]]) -> set[str]:
    for name in ours[LONG]:
        ours[LONG][name][255] = np.nan
    return STATES


def zero_row(ours: list[dict[str, Any]]) -> set[str]:
    for name in ours[0]:
        ours[0][name][0] = 0
    return STATES


def row_missing(ours: list[dict[str, Any]]) -> set[str]:
    for name in ours[1]:
        ours[1][name] = ours[1][name][:-1]
    return STATES


def column_missing(ours: list[dict[str, Any]]) -> set[str]:
    del ours[0]["hidden_2"]
    return {"hidden_2"}


SABOTAGES: list[Callable[[list[dict[str, Any]]], set[str]]] = [
    shift_down, shift_up, drop_residual, residual_twice, drop_norm, norm_too_early, norm_without_weight, swap_two_rows,
    rows_one_off, row_of_another_prompt, second_chunk_stale, poisoned_slot, zero_row, row_missing, column_missing,
]  # fmt: skip


def test_an_honest_run_passes(twin: Twin) -> None:
    assert twin.failed(twin.copy()) == set()
    assert "WRONG" not in "\n".join(table(compare(twin.bf16, twin.truth, twin.bf16, twin.spec.columns)))


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda function: function.__name__)
def test_sabotage_fails(twin: Twin, sabotage: Callable[[list[dict[str, Any]]], set[str]]) -> None:
    ours = twin.copy()
    expected = sabotage(ours)
    assert twin.failed(ours) >= expected


@pytest.mark.parametrize("position", [0, 3, 150])
def test_one_stale_kv_slot_fails(twin: Twin, position: int) -> None:
    """Later tokens that attend to another token's key and value at one position, all rows being in their place."""
    import torch

    model = load_model(twin.folder, torch.bfloat16, "cpu")
    other = twin.prompts[LONG].copy()
    other[position] = (other[position] + 7) % 1900 + 3
    altered = Reference(model, twin.spec).states(other)
    ours = twin.copy()
    for name, state in altered.items():
        state[position] = ours[LONG][name][position]
        ours[LONG][name] = state
    assert twin.failed(ours) == STATES - {"hidden_0"}


def test_layers_differ_clearly(twin: Twin) -> None:
    """By far more than what is allowed: a layer's state never passes for its neighbour's."""
    for i in range(LAYERS):
        here, there = (twin.truth[LONG][f"hidden_{k}"] for k in (i, i + 1))
        assert np.sqrt((token_errors(here, there) ** 2).mean()) > 0.3


def a_proof(**changes: Any) -> Proof:
    how = str(entry_for("LlamaForCausalLM", "0.5.23"))
    proof = Proof("LlamaForCausalLM", "0.5.23", "cpu", True, how, True, {"hidden_0": 0.0}, {"hidden_0": 0.0}, 0.0)
    return replace(proof, **changes)


OPTIONS = SimpleNamespace(release="0.5.23", device="cpu", tp_size=2, attention_backend=None, trust_remote_code=False)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of a Llama on two ranks on CPU, which has no shipped proof, and an empty cache."""
    monkeypatch.setenv("HS_RAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama"]))
    return SimpleNamespace(**vars(OPTIONS), model_path=str(tmp_path))


def test_auto_proves_once_and_keeps(options: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    monkeypatch.setattr(run, "prove", lambda request: asked.append(request) or a_proof())
    assert run.ensure(options, "auto") == a_proof()
    assert run.ensure(options, "auto") == a_proof()
    assert [str(request.key) for request in asked] == ["LlamaForCausalLM on SGLang 0.5.23, cpu, tp_size > 1"]
    run.ensure(options, "always")
    assert len(asked) == 2


def test_never_asks_for_nothing(options: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "prove", lambda request: pytest.fail("proven"))
    assert run.ensure(options, "never") is None


def test_a_failed_proof_stops_and_is_not_kept(options: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = a_proof(ok=False, table=["hidden_1 0.7 WRONG"])
    monkeypatch.setattr(run, "prove", lambda request: wrong)
    with pytest.raises(run.ProofError, match="not those of transformers\nhidden_1 0.7 WRONG"):
        run.ensure(options)
    assert find_proof(wrong.key) is None


def test_a_proof_holds_only_for_the_way_it_was_captured(options: SimpleNamespace) -> None:
    key = a_proof().key
    for stale in (a_proof(how="hook"), a_proof(ok=False), a_proof(release="0.5.17")):
        add_proofs(cached_path(key), [stale])
        assert find_proof(key) is None
    add_proofs(cached_path(key), [a_proof()])
    assert find_proof(key) == a_proof()
    cached_path(key).write_text("[{")
    assert find_proof(key) is None


def test_a_newer_proof_replaces(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    other = a_proof(device="cuda")
    add_proofs(path, [a_proof(date="1"), other])
    add_proofs(path, [a_proof(date="2")])
    assert read_proofs(path) == [a_proof(date="2"), other]


def test_a_proof_that_does_not_end_is_ended() -> None:
    with pytest.raises(run.ProofError, match="stopped after 0 s"):
        run.prove(Request(config=SHAPES["llama"], release="0.5.23", device="cpu"), limit_s=0.2)


def test_a_proof_that_breaks_says_why() -> None:
    broken = {**SHAPES["llama"], "hidden_act": "nonsense"}
    with pytest.raises(run.ProofError, match="(?s)exit code 1.*nonsense") as caught:
        run.prove(Request(config=broken, release="0.5.23", device="cpu"), limit_s=120)
    assert "Traceback" in str(caught.value)


@pytest.mark.parametrize(("codes", "runs"), [([-9, 0], 2), ([-9, -6, -9], 3), ([1], 1), ([None], 1)])
def test_a_killed_proof_is_run_again(codes: list[int | None], runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is being emptied kills what runs there; what a proof says itself it would say again."""
    asked: list[Path] = []

    def run_group(command: list[str], folder: Path, output: Path, limit_s: float) -> int | None:
        asked.append(folder)
        output.write_text(f"run {len(asked)}")
        code = codes[len(asked) - 1]
        if code == 0:
            add_proofs(Path(command[-1]), [a_proof()])
        return code

    monkeypatch.setattr(run, "_run_group", run_group)
    request = Request(config=SHAPES["llama"], release="0.5.23", device="cpu")
    if codes[-1] == 0:
        assert run.prove(request) == a_proof()
    else:
        with pytest.raises(run.ProofError, match=f"did not run to its end(?s:.*)run {runs}"):
            run.prove(request)
    assert len(set(asked)) == runs  # each in a folder of its own


SGLANG = {
    "raised": "Scheduler hit an exception: Traceback (most recent call last):\nValueError: no such layer\n",
    "killed": "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n",
}


@pytest.mark.parametrize("first", ["the worker's end", "SGLang's end"])
@pytest.mark.parametrize(("why", "runs"), [("raised", 1), ("killed", 3)])
def test_what_a_scheduler_raises_it_would_raise_again(
    why: str, runs: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way SGLang ends the worker by a signal, unless the worker sees first that its engine is gone."""
    asked: list[Path] = []

    def run_group(command: list[str], folder: Path, output: Path, limit_s: float) -> int:
        asked.append(folder)
        output.write_text("a warning\n" * 1000 + SGLANG[why])
        if first == "the worker's end":
            Path(command[-1]).with_suffix(".error").write_text("EngineDiedError: it is gone")
        else:
            with output.open("a") as file:
                file.write("Received sigquit from a child process. It usually means the child failed.\n")
        return -signal.SIGKILL

    monkeypatch.setattr(run, "_run_group", run_group)
    with pytest.raises(run.ProofError, match=f"did not run to its end(?s:.*){SGLANG[why][-20:-5]}") as caught:
        run.prove(Request(config=SHAPES["llama"], release="0.5.23", device="cpu"))
    assert len(asked) == runs
    assert ("EngineDiedError: it is gone" in str(caught.value)) == (first == "the worker's end")


def test_the_death_of_an_engine_ends_its_proof_by_signal(tmp_path: Path) -> None:
    asked, result = tmp_path / "request.json", tmp_path / "result.json"
    asked.write_text(Request(config=SHAPES["llama"], release="0.5.23", device="cpu").to_json())
    code = (
        "import sys\n"
        "from hs_ray.engine.engine import EngineDiedError\n"
        "from hs_ray.prove import measure, worker\n"
        "def killed(_): raise EngineDiedError('the scheduler is gone')\n"
        "measure.measure = killed\n"
        f"sys.argv = ['worker', {str(asked)!r}, {str(result)!r}]\n"
        "worker.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, start_new_session=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert result.with_suffix(".error").read_text() == "EngineDiedError: the scheduler is gone"


def test_unknown_classes_are_refused_by_name() -> None:
    run.check("LlamaForCausalLM", "0.5.23", "m")
    with pytest.raises(UnsupportedError, match="model.path = m: MiniCPMForCausalLM is not supported.*scaled"):
        run.check("MiniCPMForCausalLM", "0.5.23", "m")
    with pytest.raises(UnsupportedError, match=r"FooForCausalLM is not supported with SGLang 0\.5\.23; supported: "):
        run.check("FooForCausalLM", "0.5.23", "m")


def test_classes_that_sglang_does_not_run_on_cpu() -> None:
    run.check("Qwen3NextForCausalLM", "0.5.23", "m", "cuda")
    with pytest.raises(
        UnsupportedError, match="Qwen3NextForCausalLM does not run in SGLang on CPU: its linear attention"
    ):
        run.prove(Request(config=SHAPES["qwen3_next"], release="0.5.23", device="cpu"))


def test_shipped_proofs_are_in_force() -> None:
    proofs = read_proofs()
    assert {proof.key for proof in proofs} >= {Key("LlamaForCausalLM", "0.5.23", "cpu", False)}
    assert [str(proof.key) for proof in proofs if not proof.in_force] == [], "prove them again"


def test_models_page_is_made_from_the_proofs() -> None:
    assert (ROOT / "docs/models.md").read_text() == docs.markdown(), "python -m hs_ray.prove.docs > docs/models.md"
