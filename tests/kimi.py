"""A folder that describes Kimi-K2.5 as its own does, without its weights and with a small tokenizer."""

import json
import shutil
import sys
from pathlib import Path

from hs_ray.builtin_models import builtin_folder

CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "media_placeholder_token_id": 163605,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}


def write_kimi(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for path in builtin_folder("builtin:tiny_random").iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            shutil.copy(path, folder)
    return folder


if __name__ == "__main__":
    print(write_kimi(Path(sys.argv[1])))
