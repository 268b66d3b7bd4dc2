"""What the user must change is told at once, whatever kinds of mistakes meet; and what an earlier start left."""

import json
from pathlib import Path

import pytest

from hs_ray.config import ExtractJob
from hs_ray.engine import patching
from hs_ray.errors import ConfigError, PatchError, UnsupportedError
from hs_ray.pipeline.preflight import preflight


def model_folder(tmp_path: Path, **changes: object) -> str:
    """A folder with a config.json: all that a dry run needs of a model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 16,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return str(tmp_path)


def job(tmp_path: Path, **model: object) -> ExtractJob:
    made = ExtractJob(max_seq_len=64, dry_run=True)
    made.model.path = model_folder(tmp_path, **model)
    made.output.path = str(tmp_path / "out")
    return made


def problems(wrong: ExtractJob) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight(wrong)
    return caught.value.problems


def test_an_unsupported_class_and_everything_else(tmp_path: Path) -> None:
    wrong = job(tmp_path, architectures=["FooForCausalLM"])
    wrong.layers, wrong.max_seq_len, wrong.engine.device = [99], 65, "tpu"
    wrong.input.path, wrong.output.path = str(tmp_path / "none.jsonl"), "ftp://host/x"
    assert [problem.split(": ")[0] for problem in problems(wrong)] == [
        "engine.device = tpu",
        f"model.path = {tmp_path}",
        "layers = [99]",
        "max_seq_len = 65",
        f"input.path = {tmp_path}/none.jsonl",
        "output.path = ftp://host/x",
    ]


def test_a_model_that_is_no_decoder_and_everything_else(tmp_path: Path) -> None:
    wrong = job(tmp_path, is_encoder_decoder=True)
    wrong.max_seq_len, wrong.model.chat_template = 0, "/none.jinja"
    assert [problem.split(" = ")[0] for problem in problems(wrong)] == [
        "max_seq_len", "model.path", "model.chat_template"
    ]  # fmt: skip


@pytest.mark.parametrize("error", [UnsupportedError("sglang = 9"), PatchError("patches/sglang: hunk 1 does not fit")])
def test_an_sglang_that_does_not_fit_and_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(patching, "check_installed", refuse)
    wrong = job(tmp_path)
    wrong.layers = [99]
    found = problems(wrong)
    assert found[0] == str(error) and found[1].startswith("layers = [99]: ") and len(found) == 2


def test_a_class_that_does_not_run_on_the_device_that_was_asked_for(tmp_path: Path) -> None:
    wrong = job(tmp_path, architectures=["Qwen3NextForCausalLM"])
    preflight(wrong)
    wrong.engine.device = "cpu"
    [problem] = problems(wrong)
    assert "Qwen3NextForCausalLM does not run in SGLang on CPU" in problem


def test_a_job_without_mistakes(tmp_path: Path) -> None:
    flight = preflight(job(tmp_path))
    assert flight.resolved.spec.layers == (2, 4, 5) and flight.storage.root == f"{tmp_path}/out"
    assert set(flight.versions) >= {"sglang", "patch"} and flight.sources
    assert flight.versions["capture"] == "native"
