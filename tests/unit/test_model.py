"""What is read of a model folder: shapes, context, digests, tokenizer, final norm; and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hs_ray.builtin_models import builtin_folder
from hs_ray.config import ModelConfig
from hs_ray.errors import ConfigError, HsRayError, UnsupportedError
from hs_ray.model import (
    PLUS_ONE_NORMS,
    final_norm,
    load_tokenizer,
    local_weights,
    resolve_model,
    tokenizer_digest,
)


def config_of(path: Path | str, **keys: Any) -> ModelConfig:
    return ModelConfig(path=str(path), **keys)


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> Path:
    """Change config.json; a value of None removes the key."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return folder


def test_smollm2(smollm2: Path) -> None:
    config = config_of("builtin:smollm2")
    info = resolve_model(config)
    assert (info.name, info.path, info.revision) == ("builtin:smollm2", str(smollm2), None)
    assert (info.architecture, info.num_hidden_layers, info.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (info.vocab_size, info.context_length) == (49152, 8192)
    assert local_weights(info) == info.path
    tokenizer = load_tokenizer(info, config)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer("Grüße, 世界 12345").input_ids) == "Grüße, 世界 12345"
    assert "local_files_only" not in json.loads((smollm2 / "tokenizer_config.json").read_text())


def test_smollm2_is_the_real_model(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = config_of(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    assert getattr(model.config, "quantization_config", None) is None
    tokenizer = load_tokenizer(resolve_model(config), config)
    chat = [{"role": "user", "content": "What is the capital of France? One sentence."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_tiny_random_is_the_same_wherever_it_is_made(
    tiny_random: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model(config_of(tiny_random))
    monkeypatch.setenv("HS_RAY_CACHE", str(tmp_path / "cache"))
    second = resolve_model(config_of("builtin:tiny_random"))
    assert second.path.startswith(str(tmp_path))
    assert second.digest == first.digest
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [Path(second.path).name]  # no staging folder


def test_tiny_layers_differ_clearly(tiny_llama: Path, tiny_qwen3: Path) -> None:
    from transformers import AutoModelForCausalLM

    for folder in (tiny_llama, tiny_qwen3):
        model = AutoModelForCausalLM.from_pretrained(folder)
        states = model(torch.arange(1, 60)[None], output_hidden_states=True).hidden_states
        assert len(states) == 9
        for here, following in zip(states, states[1:], strict=False):
            assert torch.isfinite(following).all()
            assert ((following - here).norm() / here.norm()).item() > 0.2


def test_interrupted_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HS_RAY_CACHE", str(tmp_path))

    def broken(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("hs_ray.builtin_models._make_tiny_random", broken)
    with pytest.raises(KeyboardInterrupt):
        builtin_folder("builtin:tiny_random")
    assert list(tmp_path.iterdir()) == []


def test_digest_is_of_the_content(copy: Path, tmp_path: Path) -> None:
    before = resolve_model(config_of(copy)).digest
    moved = copy.rename(tmp_path / "elsewhere")
    assert resolve_model(config_of(moved)).digest == before
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    middle = len(data) // 2
    data[middle : middle + len(data) // 4] = bytes(len(data) // 4)  # fine-tuned: same header, same size
    weights.write_bytes(data)
    changed = resolve_model(config_of(moved)).digest
    assert changed != before
    edit(moved, rms_norm_eps=1e-3)
    assert resolve_model(config_of(moved)).digest not in (before, changed)


def test_a_dry_run_needs_no_weights(copy: Path) -> None:
    with_weights = resolve_model(config_of(copy))
    (copy / "model.safetensors").unlink()
    assert resolve_model(config_of(copy), weights=False).hidden_size == with_weights.hidden_size
    with pytest.raises(ConfigError, match="safetensors"):
        resolve_model(config_of(copy))


def test_wrapper_is_followed_to_its_text_model(copy: Path) -> None:
    """As Kimi-K2.5 and Gemma 3 spell it."""
    path = copy / "config.json"
    text = json.loads(path.read_text())
    path.write_text(
        json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "hidden_size": 1, "text_config": text})
    )
    info = resolve_model(config_of(copy))
    assert (info.architecture, info.num_hidden_layers, info.hidden_size) == ("KimiK25ForConditionalGeneration", 8, 128)


def test_defaults_of_the_class_are_filled_in(copy: Path) -> None:
    """Gemma 3's config.json leaves its vocabulary out."""
    assert resolve_model(config_of(edit(copy, model_type="gemma3_text", vocab_size=None))).vocab_size == 262_208


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 8192),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 32768),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
    ],
)
def test_context_length(copy: Path, changes: dict[str, Any], context: int) -> None:
    assert resolve_model(config_of(edit(copy, **changes))).context_length == context


def refusal(config: ModelConfig) -> str:
    with pytest.raises(HsRayError) as caught:
        resolve_model(config)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_folders_refused(copy: Path, tmp_path: Path) -> None:
    missing = f"{tmp_path}/nothing"
    assert refusal(config_of(missing)) == (
        f"model.path = {missing}: no such folder here; give a folder, or a hub name such as Qwen/Qwen3-8B"
    )
    assert "builtin models are builtin:smollm2, builtin:tiny_random" in refusal(config_of("builtin:gpt5"))
    assert "has no config.json" in refusal(config_of(tmp_path))
    assert refusal(config_of(copy, revision="main")) == (
        f"model.revision = main: only for hub names, and {copy} is a folder; leave it out"
    )
    assert "model.tokenizer = /no/such" in refusal(config_of(copy, tokenizer="/no/such"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "config.json").write_text("{"), "its config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda f: edit(f, architectures=None), "names no architecture"),
        (lambda f: edit(f, is_encoder_decoder=True), "has an encoder"),
        (lambda f: edit(f, hidden_size=None, model_type="nonsense"), "is not understood"),
        (lambda f: edit(f, max_position_embeddings=None), "gives no context length"),
        (lambda f: (f / "model.safetensors").unlink(), "has no *.safetensors; other formats run code when read"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]), "cut off"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "cut off"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-00001.safetensors"}}'
            ),
            "1 weight files are missing, the first is model-00001.safetensors",
        ),
    ],
)
def test_damaged_folders_refused(copy: Path, damage: Callable[[Path], Any], text: str) -> None:
    damage(copy)
    assert text in refusal(config_of(copy))


def test_hub_name_from_the_local_cache(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network: huggingface_hub's own cache layout, as a download leaves it."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--tiny" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    copy.rename(snapshot)
    (cache / "models--org--tiny" / "refs").mkdir()
    (cache / "models--org--tiny" / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    info = resolve_model(config_of("org/tiny"))
    assert (info.name, info.path, info.revision) == ("org/tiny", str(snapshot), commit)
    assert local_weights(info) == str(snapshot)
    assert final_norm(info)[0].shape == (128,)
    text = refusal(config_of("org/unknown"))
    assert text.startswith("model.path = org/unknown: no such folder here, and as a hub name it cannot be had (")
    assert text.endswith("check spelling and network, or give a local folder")
    assert len(text.splitlines()) == 1


def test_final_norm_turns_pre_into_post(tiny_llama: Path, tiny_qwen3: Path) -> None:
    from transformers import AutoModelForCausalLM

    for folder in (tiny_llama, tiny_qwen3):
        weight, eps, kind = final_norm(resolve_model(config_of(folder)))
        assert (weight.dtype, kind) == (torch.bfloat16, "rms_norm")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
        pre: list[torch.Tensor] = []
        model.norm.register_forward_pre_hook(lambda _, args, kept=pre: kept.append(args[0]))
        post = model(torch.arange(1, 20)[None]).last_hidden_state
        x = pre[0]
        ours = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        torch.testing.assert_close(ours, post, rtol=1e-5, atol=1e-5)


def test_final_norm_of_gemma_adds_one(make_tiny: Callable[..., Path]) -> None:
    from transformers import GemmaConfig

    folder = make_tiny(GemmaConfig, num_hidden_layers=2)
    weight, _, kind = final_norm(resolve_model(config_of(folder)))
    assert kind == "rms_norm_plus_one"
    assert abs(weight.float().mean()) < 0.2  # around 0: the 1 is not in it


def test_final_norm_that_no_kind_describes(make_tiny: Callable[..., Path]) -> None:
    from transformers import GPT2Config

    folder = make_tiny(GPT2Config, n_layer=2, n_embd=128, n_head=2)
    info = resolve_model(config_of(folder))
    assert (info.num_hidden_layers, info.hidden_size) == (8, 128)
    with pytest.raises(UnsupportedError, match=r"LayerNorm with more than a weight.*capture\.final=post_norm"):
        final_norm(info)


def test_plus_one_norms_are_those_of_transformers() -> None:
    """A family that transformers adds must not be taken for a plain RMS norm."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    adds_one = re.compile(r"\(1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1")
    other = {"nemotron", "t5gemma", "t5gemma2", "videoprism"}  # a LayerNorm (refused); encoders
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if adds_one.search(path.read_text())}
    assert found - other - PLUS_ONE_NORMS == set()
    types = {
        name
        for family in found - other
        for path in (folder / family).glob("configuration_*.py")
        for name in re.findall(r'^    model_type = "(\w+)"', path.read_text(), re.M)
        if "vision" not in name
    }
    assert types - PLUS_ONE_NORMS == set()


def test_chat_template_replaces_the_tokenizers_own(tiny_random: Path, tmp_path: Path) -> None:
    template = tmp_path / "shout.jinja"
    template.write_text("{% for m in messages %}{{ m.content | upper }}!{% endfor %}")
    plain, own = config_of(tiny_random), config_of(tiny_random, chat_template=str(template))
    info = resolve_model(own)
    assert load_tokenizer(info, own).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "HI!"
    first = tokenizer_digest(info, own)
    assert first != tokenizer_digest(info, plain)
    template.write_text("{{ messages }}")
    assert tokenizer_digest(info, own) != first
    with pytest.raises(ConfigError, match=r"^model\.chat_template = /no/such: a file with a Jinja template"):
        load_tokenizer(info, config_of(tiny_random, chat_template="/no/such"))


def test_tokenizer_apart_from_the_model(tiny_llama: Path, tiny_random: Path) -> None:
    config = config_of(tiny_llama, tokenizer=str(tiny_random))
    info = resolve_model(config)
    assert (info.path, info.tokenizer_path) == (str(tiny_llama), str(tiny_random))
    assert load_tokenizer(info, config)("a").input_ids
    alone = config_of(tiny_llama)
    with pytest.raises(ConfigError, match=r"^model\.path = .*: its tokenizer cannot be loaded"):
        load_tokenizer(resolve_model(alone), alone)


def test_tokenizer_that_is_code_is_not_run(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "code"))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    config = config_of(folder)
    with pytest.raises(ConfigError, match=r"if it is Python code that you trust, model\.trust_remote_code=true$"):
        load_tokenizer(resolve_model(config), config)
    assert not (tmp_path / "ran").exists()
