"""A small random model of the same class and options as a real one: its twin, of the config that `shrink` makes.

Weights are drawn so that a mistake cannot hide:
    every matrix with 1/sqrt(fan in), so each layer adds about as much as came in: a state one layer off, or
        without its residual, is off by about one half
    norm weights spread around their initial value: a norm left out or applied twice shows
    queries larger by half: attention picks few tokens, and one stale KV slot shows
    experts alike up to a twentieth: where routing is a tie, bf16 picks another expert than fp32, which must stay noise
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hs_ray.model import text_part
from hs_ray.prove.shrink import CODE, shrink, shrink_wrapper

QUERY_SCALE = 1.5
EXPERT_DIFFERENCE = 0.05


def draw_weights(model: Any, seed: int = 0) -> None:
    """Fill a transformers model with random weights, in place; see the top of this file."""
    import torch

    alike: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: Any) -> Any:
        return torch.empty(shape).normal_(generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if parameter.dim() < 2:
                values = parameter.float().cpu() + torch.empty(shape).uniform_(-0.4, 0.4, generator=generator)
                values = values + (QUERY_SCALE - 1) if "q_norm" in name else values
            elif "expert" in name and parameter.dim() == 3:
                values = normal((1, *shape[1:])) + EXPERT_DIFFERENCE * normal(shape)
            elif match := re.search(r"experts\.\d+\.", name):
                key = name.replace(match[0], "experts.")
                common = alike.setdefault(key, normal(shape))
                values = common + EXPERT_DIFFERENCE * normal(shape)
            else:
                values = normal(shape) * (QUERY_SCALE if re.search(r"\bq_(b_)?proj\b", name) else 1.0)
            if parameter.dim() >= 2:
                values = values * _fan_in(name, parameter, model) ** -0.5
            parameter.copy_(values.to(parameter.dtype))


def _fan_in(name: str, parameter: Any, model: Any) -> int:
    """Inputs of one output: the last dimension, but of experts stored as [E, in, out] the middle one."""
    if parameter.dim() == 3 and "expert" in name:
        owner = model.get_submodule(name.rpartition(".")[0])
        if getattr(owner, "is_transposed", False) or type(owner).__name__ in ("GptOssExperts", "Llama4TextExperts"):
            return int(parameter.shape[1])
    return int(parameter[0].numel()) if "conv" in name else int(parameter.shape[-1])


def make_twin(raw: Mapping[str, Any], folder: Path, tp_size: int = 1, seed: int = 0, code: Path | None = None) -> dict:
    """Write the twin of a model to `folder`: config.json and bf16 weights, no tokenizer. Returns its config.

    code: the model's folder, where its classes come with it (trust_remote_code); used where transformers has none.
    """
    wrapped = WRAPPED.get(_architecture(raw))
    if wrapped is not None:
        return _make_wrapped_twin(raw, *wrapped, folder, tp_size, seed)
    raw = _native(raw)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    if code is not None:
        for source in code.glob("*.py"):
            (folder / source.name).write_bytes(source.read_bytes())
    trust = code is not None
    path = folder / "config.json"
    path.write_text(json.dumps(dict(raw)))
    full = AutoConfig.from_pretrained(folder, trust_remote_code=trust).to_dict()
    config = shrink(raw, full, tp_size)
    path.write_text(json.dumps(config, indent=1))
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    auto = AutoModelForCausalLM if text_part(config) is config else AutoModelForImageTextToText
    model = auto.from_config(loaded, dtype=torch.float32, trust_remote_code=trust)
    draw_weights(model, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    _name_as_published(folder, str(config.get("model_type")))
    # As the real file spells it: SGLang reads keys that transformers drops when it saves.
    path.write_text(json.dumps(config, indent=1))
    return config


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


def _native(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config as transformers' own class of that architecture takes it; unchanged where it has none.

    SGLang goes by the architecture's name alone. Published configs name code that comes with the model, which was
    written for some older transformers, or a model_type of their own (Kimi-K2 is a DeepseekV3ForCausalLM).
    """
    import transformers

    own = getattr(transformers, _architecture(raw), None)
    if own is None:
        return dict(raw)
    return {name: value for name, value in raw.items() if name != CODE} | {"model_type": own.config_class.model_type}


# Wrappers that are published before transformers knows them, around a language model that it does know:
# architecture -> (that of the language model, prefix of its tensors in the wrapper's checkpoint).
WRAPPED = {"KimiK25ForConditionalGeneration": ("DeepseekV3ForCausalLM", "language_model.")}
LANGUAGE_MODEL = "language_model"


def _make_wrapped_twin(
    raw: Mapping[str, Any], architecture: str, prefix: str, folder: Path, tp_size: int, seed: int
) -> dict:
    """The language model's twin in a folder of its own, for transformers, and its tensors in the wrapper's, for SGLang.

    The tower beside it has no weights: no prompt has pictures.
    """
    from safetensors.torch import load_file, save_file

    inside = folder / LANGUAGE_MODEL
    small = make_twin({**text_part(dict(raw)), "architectures": [architecture]}, inside, tp_size, seed)
    config = shrink_wrapper(raw, small)
    for path in inside.glob("*.safetensors"):
        tensors = {prefix + name: tensor for name, tensor in load_file(path).items()}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return config


def reference_folder(folder: Path) -> Path:
    """What transformers loads of a twin's folder: all of it, or the language model that is wrapped."""
    inside = folder / LANGUAGE_MODEL
    return inside if inside.is_dir() else folder


# Where transformers saves tensors under other names than published checkpoints, and SGLang, have: pattern -> name.
PUBLISHED_NAMES = {"gemma3": {r"^vision_tower\.(?!vision_model)": "vision_tower.vision_model."}}


def _name_as_published(folder: Path, model_type: str) -> None:
    from safetensors.torch import load_file, save_file

    names = PUBLISHED_NAMES.get(model_type, {})
    for path in folder.glob("*.safetensors") if names else ():
        tensors = load_file(path)
        for pattern, published in names.items():
            tensors = {re.sub(pattern, published, name): tensor for name, tensor in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})
