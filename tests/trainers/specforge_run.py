"""What SpecForge's command line needs beside our export: the target's index, a drafter's shape, settings."""

import json
from pathlib import Path
from typing import Any

EMBEDDINGS = "model.embed_tokens.weight"
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def target_folder(model: Path, folder: Path) -> Path:
    """The model with an index, which the reader of the head needs even where there is one file."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    weights = {EMBEDDINGS: "model.safetensors", "model.norm.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def draft_config(config: dict[str, Any], draft_vocab: int, layer_ids: list[int]) -> dict[str, Any]:
    """A drafter of one layer of the target's own sizes. config: the target's; layer_ids: as transformers counts."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layer_ids]},
        **{name: config[name] for name in SIZES},
        "rope_theta": config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
    }


def run_config(target: Path, export: Path, mapping: Path, result: Path, dtype: str) -> dict[str, Any]:
    """`specforge train -c`: where everything is; the caller adds to `data` and `training`."""
    return {
        "run_id": "run",
        "output_dir": str(result / "trained"),
        "model": {
            "target_model_path": str(target),
            "draft_model_config": str(result / "draft.json"),
            "lm_head_key": EMBEDDINGS,
            "vocab_mapping_path": str(mapping),
            "torch_dtype": dtype,
        },
        "data": {"hidden_states_path": str(export / "data"), "dataloader_num_workers": 0},
        "training": {
            "strategy": "eagle3",
            "learning_rate": 1e-3,
            "attention_backend": "sdpa",
            "fsdp_sharding": "NO_SHARD",
        },
    }


def export_drafter(result: Path, mapping: Path) -> int:
    """`specforge export --to sglang` of what was trained under `result`, into `result/drafter`; its exit code."""
    from specforge import cli

    source = ["--checkpoint", str(result / "trained"), "--draft-config", str(result / "draft.json")]
    drafter = ["--output-dir", str(result / "drafter"), "--vocab-mapping", str(mapping)]
    code: int = cli.main(["export", "--to", "sglang", *source, *drafter])
    return code
