"""SpecForge's own reader, target head, command line and export on our export. See check.py."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import no_triton  # noqa: F401  (must come before specforge)
import torch
from check import DRAFT_VOCAB, LAYER_IDS, STEPS, agreement, arguments, report
from safetensors import safe_open
from specforge import cli
from specforge.algorithms.eagle3.data import build_offline_reader, normalize_offline_sample
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.training.strategies.base import Eagle3TrainStrategy
from specforge_run import EMBEDDINGS, draft_config, export_drafter, run_config, target_folder
from transformers.models.llama.modeling_llama import LlamaRMSNorm

MAX_LENGTH = 512


def main() -> None:
    model, export, result = arguments()
    target = target_folder(model, result / "target")
    reader = build_offline_reader(str(export / "data"), run_id="check", ttt_length=3, max_len=MAX_LENGTH)
    files = [ref.feature_store_uri.removeprefix("file://") for ref in reader.read()]
    samples = [normalize_offline_sample(load_feature_file(file), MAX_LENGTH) for file in files]
    head = TargetHead.from_pretrained(str(target), lm_head_key=EMBEDDINGS).float()
    ids = [sample["input_ids"][0] for sample in samples]
    masks = [sample["loss_mask"][0] for sample in samples]
    config = json.loads((model / "config.json").read_text())
    norm = final_norm(target, config)

    def choices(wrong: bool) -> float:
        states = [norm(sample["target"]) if wrong else sample["target"] for sample in samples]
        return agreement([head(state.float())[0].argmax(-1) for state in states], ids, masks)

    with torch.no_grad():
        right, twice_normed = choices(wrong=False), choices(wrong=True)
    losses = train_and_export(target, export, result, config)
    mapping = torch.load(export / "vocab_mapping/vocab_mapping.pt")
    report(
        result,
        ["specforge", "torch", "transformers", "datasets"],
        samples=len(samples),
        unreadable=0,
        shape=list(samples[0]["hidden_state"].shape[2:]),
        vocabulary=own_mapping(files, config["vocab_size"], mapping),
        right=right,
        wrong=twice_normed,
        losses=losses,
    )


def final_norm(target: Path, config: dict[str, Any]) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(config["hidden_size"], config["rms_norm_eps"]).to(torch.bfloat16)
    with safe_open(target / "model.safetensors", framework="pt") as tensors:
        norm.load_state_dict({"weight": tensors.get_tensor("model.norm.weight")})
    return norm


def own_mapping(files: list[str], vocab_size: int, mapping: dict[str, torch.Tensor]) -> bool:
    """Whether SpecForge would keep the same tokens (ties between equally rare ones may fall otherwise)."""
    counts: Counter[int] = Counter()
    for file in files:
        raw = load_feature_file(file)
        counts.update(raw["input_ids"][raw["loss_mask"] == 1].tolist())
    kept = mapping["d2t"] + torch.arange(DRAFT_VOCAB)
    rarest_kept = min(counts[token] for token in kept.tolist())
    most_dropped = max((number for token, number in counts.items() if not mapping["t2d"][token]), default=0)
    return bool(mapping["t2d"][kept].all()) and len(mapping["t2d"]) == vocab_size and most_dropped <= rarest_kept


def train_and_export(target: Path, export: Path, result: Path, config: dict[str, Any]) -> list[float]:
    """`specforge train` and `specforge export`; all samples are one batch, so that losses compare."""
    mapping = export / "vocab_mapping/vocab_mapping.pt"
    run = run_config(target, export, mapping, result, "float32")
    run["data"]["max_length"] = MAX_LENGTH
    run["training"] |= {"num_epochs": STEPS, "max_steps": STEPS, "batch_size": 8, "ttt_length": 3, "log_interval": 1}
    (result / "draft.json").write_text(json.dumps(draft_config(config, DRAFT_VOCAB, LAYER_IDS)))
    (result / "run.json").write_text(json.dumps(run))
    losses: list[float] = []
    forward = Eagle3TrainStrategy.forward_loss

    def recorded(self: Any, batch: Any, *args: Any) -> Any:
        self.target_head.float()
        batch.tensors.update({name: batch.tensors[name].float() for name in ("hidden_state", "target")})
        step = forward(self, batch, *args)
        losses.append(float(step.loss.detach()))
        return step

    Eagle3TrainStrategy.forward_loss = recorded
    assert cli.main(["train", "-c", str(result / "run.json")]) == 0
    assert export_drafter(result, mapping) == 0
    return losses


if __name__ == "__main__":
    main()
