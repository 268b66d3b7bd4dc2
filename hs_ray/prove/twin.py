"""A small random model of the same class and options as a real one: its twin.

Shrunk are counts and widths that no code path depends on. What decides the path stays: kinds of layers and their
order, head sizes, norms, RoPE, windows, routing, scales and every option that is not named below.

Weights are drawn so that a mistake cannot hide:
    every matrix with 1/sqrt(fan in), so each layer adds about as much as came in: a state one layer off, or
        without its residual, is off by about one half
    norm weights spread around their initial value: a norm left out or applied twice shows
    queries larger by half: attention picks few tokens, and one stale KV slot shows
    experts alike up to a twentieth: where routing is a tie, bf16 picks another expert than fp32, which must stay noise
"""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hs_ray.model import TEXT_PARTS, text_part

LEAST_LAYERS, MOST_LAYERS = 4, 12
WIDTH, HEADS, EXPERTS, VOCAB, CONTEXT = 256, 4, 8, 2048, 32768
WINDOW = 64  # sliding windows are shorter than the prompts, so they count
QUERY_SCALE = 1.5
EXPERT_DIFFERENCE = 0.05

DENSE_WIDTHS = ("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp")
EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DROPPED = ("quantization_config", "compression_config", "_name_or_path", "transformers_version")


def shrink(raw: Mapping[str, Any], full: Mapping[str, Any] | None = None, tp_size: int = 1) -> dict[str, Any]:
    """config.json of a model -> config.json of its twin.

    full: the same with the defaults of its transformers class filled in, where the file leaves kinds of layers out.
    tp_size: widths divide by it.
    """
    config = copy.deepcopy(dict(raw))
    for name in DROPPED:
        config.pop(name, None)
    text = text_part(config)
    for name in DROPPED:
        text.pop(name, None)
    known = {**text_part(dict(full or {})), **text}
    _shrink_depth(text, known)
    _shrink_widths(text, known, tp_size)
    _shrink_experts(text, known, tp_size)
    _shrink_ids(config, text)
    if text is not config:
        _shrink_vision(config, full or {}, text["hidden_size"])
    text["dtype"] = config["dtype"] = "bfloat16"
    for part in (text, config):
        part.pop("torch_dtype", None)
    return config


def _shrink_depth(text: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Few layers, but every kind: dense and MoE, full and windowed or linear attention."""
    layers = known["num_hidden_layers"]
    count = min(LEAST_LAYERS, layers)
    kinds = known.get("layer_types") or []
    while count < min(MOST_LAYERS, layers) and set(kinds[:count]) != set(kinds):
        count += 1
    for period in ("sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval"):
        if isinstance(known.get(period), int) and known[period] > 1:
            count = max(count, min(known[period] + 1, MOST_LAYERS, layers))
    for name, value in list(text.items()):
        if isinstance(value, list) and len(value) == layers:
            text[name] = value[:count]
        elif name in ("mlp_only_layers", "moe_layers") and isinstance(value, list):
            text[name] = [i for i in value if i < count]
    if known.get("first_k_dense_replace"):
        text["first_k_dense_replace"] = 1
    for name in ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"):
        if text.get(name):
            text[name] = 0
    text["num_hidden_layers"] = count
    if "max_window_layers" in text:
        text["max_window_layers"] = min(text["max_window_layers"], count)


def _shrink_widths(text: dict[str, Any], known: Mapping[str, Any], tp_size: int) -> None:
    heads, hidden = known["num_attention_heads"], known["hidden_size"]
    kv_heads = known.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or known.get("head_dim") or hidden // heads
    count = HEADS * tp_size
    text["num_attention_heads"] = count
    if "num_key_value_heads" in known:
        text["num_key_value_heads"] = count if kv_heads == heads else max(1, count // 2)
    explicit = text.get("head_dim") or "kv_lora_rank" in known
    text["hidden_size"] = WIDTH * tp_size if explicit else count * head_dim
    for name in DENSE_WIDTHS:
        if isinstance(known.get(name), int):
            text[name] = 2 * WIDTH * tp_size
    if isinstance(known.get("q_lora_rank"), int):
        text["q_lora_rank"] = WIDTH
    for name in ("linear_num_key_heads", "linear_num_value_heads"):  # gated delta net: values per key stay
        if isinstance(known.get(name), int):
            text[name] = 2 * tp_size * known[name] // known["linear_num_key_heads"]
    for name in ("sliding_window", "sliding_window_size"):
        if isinstance(text.get(name, known.get(name)), int):
            text[name] = WINDOW
    if isinstance(text.get("max_position_embeddings"), int):
        text["max_position_embeddings"] = min(text["max_position_embeddings"], CONTEXT)


def _shrink_experts(text: dict[str, Any], known: Mapping[str, Any], tp_size: int) -> None:
    for name in EXPERT_WIDTHS:
        if isinstance(known.get(name), int):
            text[name] = WIDTH // 2 * tp_size
    if not any(isinstance(known.get(name), int) and known[name] > 1 for name in EXPERT_COUNTS):
        return
    for name in EXPERT_COUNTS:
        if isinstance(text.get(name), int):
            text[name] = EXPERTS
    for name in ("num_experts_per_tok", "moe_topk", "experts_per_token", "moe_k"):
        if isinstance(text.get(name), int):
            text[name] = min(text[name], 2)
    if (known.get("n_group") or 1) > 1:
        text["n_group"], text["topk_group"] = 2, 1


def _shrink_ids(config: dict[str, Any], text: dict[str, Any]) -> None:
    """A small vocabulary; special tokens move to its end, where no prompt has them."""
    text["vocab_size"] = VOCAB
    if "vocab_size" in config:
        config["vocab_size"] = VOCAB
    last = VOCAB - 1
    for part in (config, text):
        for name, value in part.items():
            if not re.search(r"token_(id|index|ids)$", name):
                continue
            if isinstance(value, list):
                part[name] = [last - i for i in range(len(value))]
            elif isinstance(value, int):
                part[name] = value if value < 3 else last - 8 - len(name) % 32


def _shrink_vision(config: dict[str, Any], full: Mapping[str, Any], hidden_size: int) -> None:
    """Towers beside the language model: two layers each, and its new width where they name it."""
    for name, part in config.items():
        if name in TEXT_PARTS or not name.endswith("_config") or not isinstance(part, dict):
            continue
        for key in {**(full.get(name) or {}), **part}:
            if re.fullmatch(r"(vt_)?num_hidden_layers|depth|num_layers", key):
                part[key] = 2
            elif key == "text_hidden_size":
                part[key] = hidden_size


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

    code: the model's folder, where its classes come with it (trust_remote_code).
    """
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


# Where transformers saves tensors under other names than published checkpoints, and SGLang, have: pattern -> name.
PUBLISHED_NAMES = {
    "gemma3": {r"^vision_tower\.(?!vision_model)": "vision_tower.vision_model."},
    "kimi_k25": {
        r"^language_model\.model\.blocks\.": "language_model.model.layers.",
        r"^model\.mm_projector\.": "mm_projector.",
        r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
    },
}


def _name_as_published(folder: Path, model_type: str) -> None:
    from safetensors.torch import load_file, save_file

    names = PUBLISHED_NAMES.get(model_type, {})
    for path in folder.glob("*.safetensors") if names else ():
        tensors = load_file(path)
        for pattern, published in names.items():
            tensors = {re.sub(pattern, published, name): tensor for name, tensor in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})
