"""`python tests/gpu/kimi_shape.py FOLDER LAYERS`: Kimi-K2.5's language model in its full width, with fewer layers.

Its config.json asks for FP8 weights, of which there are none: give `+engine.args.load_format=dummy`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hs_ray.prove.shapes import SHAPES

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def write_shape(folder: Path, layers: int) -> None:
    config: dict[str, Any] = {**SHAPES["kimi_k25"]["text_config"], "model_type": "deepseek_v3"}
    del config["auto_map"]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**config, "num_hidden_layers": layers, "quantization_config": FP8}, indent=1)
    (folder / "config.json").write_text(text)
    norm = torch.ones(config["hidden_size"], dtype=torch.bfloat16)  # a job keeps it beside the states
    save_file({"model.norm.weight": norm}, folder / "model.safetensors")


if __name__ == "__main__":
    write_shape(Path(sys.argv[1]), int(sys.argv[2]))
