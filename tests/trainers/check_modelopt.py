"""Model-Optimizer's own reader, model, loss and export on our export. See check.py."""

import json
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from check import DRAFT_VOCAB, LAYER_IDS, agreement, arguments, report, train
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.config import EagleConfig
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from modelopt.torch.speculative.plugins.hf_eagle import HFEagleModel
from modelopt.torch.speculative.utils import load_vlm_or_llm

TRAIN_LENGTH = 96  # the longest sample has 92


def main() -> None:
    model_path, export, result = arguments()
    files = sorted(str(path) for path in (export / "data").rglob("*.pt"))
    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    samples = [dataset[number] for number in range(len(dataset))]
    model = eagle_model(model_path)
    HFEagleModel.load_draft_vocab_cache(model, str(export / "d2t.pt"))

    def choices(norm: Any) -> float:
        states = [norm(sample["base_model_hidden_states"].float()) for sample in samples]
        found = [model._base_model_lm_head(state[None])[0].argmax(-1) for state in states]
        return agreement(found, [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples])

    with torch.no_grad():
        right, twice_normed = choices(torch.nn.Identity()), choices(model._base_model_norm)
    batch = EagleOfflineDataCollator(TRAIN_LENGTH)(samples)
    for name in ("base_model_hidden_states", "aux_hidden_states"):
        batch["base_model_outputs"][name] = batch["base_model_outputs"][name].float()
    model.train()
    losses = train(model.parameters(), lambda: model(**batch).loss)
    export_speculative_decoding(model, export_dir=result / "drafter")
    learnt = torch.cat([s["input_ids"][s["loss_mask"] == 1] for s in samples]).unique()
    kept = torch.load(export / "d2t.pt") + torch.arange(DRAFT_VOCAB)
    report(
        result,
        ["nvidia-modelopt", "torch", "transformers", "datasets"],
        samples=len(samples),
        unreadable=0,
        shape=list(samples[0]["aux_hidden_states"].shape[1:]),
        vocabulary=bool(torch.isin(learnt, kept).all()) or len(learnt) > DRAFT_VOCAB,
        right=right,
        wrong=twice_normed,
        losses=losses,
    )


def eagle_model(path: Path) -> HFEagleModel:
    """A drafter of the model's own sizes: the recipe's defaults are those of an 8 B model, with a scaled rope."""
    torch.manual_seed(0)
    config = json.loads((path / "config.json").read_text())
    rope_theta = config["rope_parameters"]["rope_theta"]
    sizes = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
    architecture = {
        **{name: config[name] for name in sizes},
        "draft_vocab_size": DRAFT_VOCAB,
        "use_aux_hidden_state": True,
        "has_lm_head": True,
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYER_IDS],
        "rope_theta": rope_theta,
        "rope_scaling": {"rope_type": "default", "rope_theta": rope_theta},
    }
    eagle = EagleConfig(
        eagle_offline=True,
        eagle_use_torch_compile=False,
        eagle_export_rope_scaling={},
        eagle_architecture_config=architecture,
    )
    model = load_vlm_or_llm(str(path), use_offline_training=True, dtype=torch.float32, device_map="cpu")
    mtsp.convert(model, [("eagle", eagle.model_dump())])
    return model


if __name__ == "__main__":
    main()
