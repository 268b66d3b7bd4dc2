"""Twins and what they are made of: small, with what decides a model's path through SGLang."""

import json
from pathlib import Path

import pytest

from hs_ray.model import text_part
from hs_ray.prove.measure import make_prompts
from hs_ray.prove.reference import load_model
from hs_ray.prove.shapes import SHAPES
from hs_ray.prove.shrink import shrink
from hs_ray.prove.twin import make_twin, reference_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SHAPES)
def test_twins_are_small_and_divide(name: str) -> None:
    for tp_size in (1, 8):
        text = text_part(shrink(SHAPES[name], tp_size=tp_size))
        assert text["num_hidden_layers"] <= 8
        assert text["hidden_size"] <= 1024 * tp_size
        assert text["num_attention_heads"] % tp_size == 0
        assert text["intermediate_size"] % (64 * tp_size) == 0
        assert text["vocab_size"] % (64 * tp_size) == 0


def test_twins_keep_kinds_of_layers() -> None:
    assert shrink(SHAPES["gemma3"])["num_hidden_layers"] == 7  # five windowed, one full, and again
    assert shrink(SHAPES["qwen3_next"])["num_hidden_layers"] == 5
    gpt_oss = shrink(SHAPES["gpt_oss"])
    assert gpt_oss["layer_types"] == ["sliding_attention", "full_attention"] * 2
    deepseek = shrink(SHAPES["deepseek_v3"])
    assert (deepseek["first_k_dense_replace"], deepseek["n_routed_experts"], deepseek["n_group"]) == (1, 8, 2)
    assert deepseek["moe_layer_freq"] == 1  # transformers drops it when it saves, SGLang reads it
    full = {"layer_types": ["linear"] * 6 + ["full"] * 6, "num_hidden_layers": 12}
    assert shrink({**SHAPES["llama"], "num_hidden_layers": 12}, full)["num_hidden_layers"] == 7


def test_special_tokens_are_in_no_prompt() -> None:
    config = shrink({**SHAPES["llama"], "eos_token_id": [128001, 128009], "image_token_id": 127000})
    used = {int(i) for prompt in make_prompts(0) for i in prompt}
    special = {*config["eos_token_id"], config["image_token_id"], config["bos_token_id"]}
    assert not used & special
    assert all(token < config["vocab_size"] for token in special)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with code for some older transformers, as models are published."""
    folder = tmp_path / "code"
    folder.mkdir()
    for name in ("configuration_kimi_k25", "modeling_kimi_k25", "configuration_deepseek", "modeling_deepseek"):
        (folder / f"{name}.py").write_text("raise ImportError('no longer in transformers')")
    return folder


def test_a_wrapper_that_transformers_may_not_know(tmp_path: Path, code: Path) -> None:
    """Kimi-K2.5: its language model's own class is the reference, and none of the code that comes with it is run."""
    config = make_twin(SHAPES["kimi_k25"], tmp_path / "twin", code=code)
    assert (config["model_type"], config["text_config"]["model_type"]) == ("kimi_k25", "kimi_k2")
    assert "auto_map" not in json.dumps(config)
    import torch
    from safetensors.torch import load_file

    inside = reference_folder(tmp_path / "twin")
    model = load_model(inside, torch.bfloat16, "cpu", trust_remote_code=True)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    wrapped = load_file(tmp_path / "twin" / "model.safetensors")
    assert {name.removeprefix("language_model.") for name in wrapped} == set(load_file(inside / "model.safetensors"))


def test_a_model_type_that_transformers_does_not_know(tmp_path: Path, code: Path) -> None:
    """Kimi-K2 is published as a DeepseekV3ForCausalLM of model_type kimi_k2."""
    shape = {**SHAPES["kimi_k25"]["text_config"], "model_type": "kimi_k2"}
    assert "auto_map" in shape
    assert make_twin(shape, tmp_path / "twin", code=code)["model_type"] == "deepseek_v3"
    assert reference_folder(tmp_path / "twin") == tmp_path / "twin"


def test_quantization_is_not_part_of_a_twin() -> None:
    config = {**SHAPES["kimi_k25"], "quantization_config": {"quant_method": "fp8"}}
    config["text_config"] = {**config["text_config"], "quantization_config": {"quant_method": "compressed-tensors"}}
    assert "quantization_config" not in json.dumps(shrink(config))
