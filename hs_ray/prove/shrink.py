"""A small config.json of the same class and options as a real one: what `twin` makes a model of.

Shrunk are counts and widths that no code path depends on. What decides the path stays: kinds of layers and their
order, head sizes, norms, RoPE, windows, routing, scales and every option that is not named below.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from hs_ray.model import TEXT_PARTS, text_part

LEAST_LAYERS, MOST_LAYERS = 4, 12
WIDTH, HEADS, EXPERTS, VOCAB, CONTEXT = 256, 4, 8, 2048, 32768
WINDOW = 64  # sliding windows are shorter than the prompts, so they count
DENSE_WIDTHS = ("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp")
EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DROPPED = ("quantization_config", "compression_config", "_name_or_path", "transformers_version", "torch_dtype")
CODE = "auto_map"  # names the Python code that comes with a model


def shrink(raw: Mapping[str, Any], full: Mapping[str, Any] | None = None, tp_size: int = 1) -> dict[str, Any]:
    """config.json of a model -> config.json of its twin.

    full: the same with the defaults of its transformers class filled in, where the file leaves kinds of layers out.
    tp_size: widths divide by it.
    """
    config = copy.deepcopy(dict(raw))
    text = text_part(config)
    known = {**text_part(dict(full or {})), **text}
    _shrink_depth(text, known)
    _shrink_widths(text, known, tp_size)
    _shrink_experts(text, known, tp_size)
    _shrink_around(config, text, full or {})
    return config


def shrink_wrapper(raw: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a wrapper -> that of its twin around a language model's twin, whose config `small` is."""
    config = {name: copy.deepcopy(value) for name, value in raw.items() if name != CODE}
    text = text_part(config)
    own_names = {name: text[name] for name in ("architectures", "model_type") if name in text}
    text.clear()
    text.update(small, **own_names)
    _shrink_around(config, text, {})
    return config


def _shrink_around(config: dict[str, Any], text: dict[str, Any], full: Mapping[str, Any]) -> None:
    """What is not the decoder: ids, towers, and what says how the real weights are stored."""
    _shrink_ids(config, text)
    if text is not config:
        _shrink_vision(config, full, text["hidden_size"])
    for part in (text, config):
        for name in DROPPED:
            part.pop(name, None)
        part["dtype"] = "bfloat16"


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
