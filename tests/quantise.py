"""An INT4 checkpoint in compressed-tensors' layout, written by hand, and the plain bf16 model it stands for."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 32  # inputs that share a scale
LEVELS = 8  # -8 ... 7
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
            },
        }
    },
}


def write_int4(model: Path, int4: Path, plain: Path) -> None:
    """The linear weights of `model`'s layers, rounded to 4 bits: packed into `int4`, multiplied out into `plain`."""
    tensors = load_file(model / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name in list(tensors):
        if not (".layers." in name and name.endswith("proj.weight")):
            packed[name] = tensors[name]
            continue
        weight = tensors[name].float()
        groups = weight.reshape(weight.shape[0], -1, GROUP)
        scale = (groups.abs().amax(dim=-1) / (LEVELS - 1)).bfloat16()
        levels = (groups / scale.float()[..., None]).round().clamp(-LEVELS, LEVELS - 1)
        tensors[name] = (levels * scale.float()[..., None]).reshape(weight.shape).bfloat16()
        stem = name.removesuffix("weight")
        packed[stem + "weight_packed"] = _pack(levels.reshape(weight.shape).to(torch.int64))
        packed[stem + "weight_scale"] = scale
        packed[stem + "weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
    config = json.loads((model / "config.json").read_text())
    for folder, content, settings in (
        (plain, tensors, config),
        (int4, packed, config | {"quantization_config": CONFIG}),
    ):
        folder.mkdir(parents=True)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(settings))


def _pack(levels: torch.Tensor) -> torch.Tensor:
    """int64 [rows, inputs] of -8 ... 7 -> int32 [rows, inputs / 8], the first input in the lowest bits."""
    nibbles = (levels + LEVELS).reshape(levels.shape[0], -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
