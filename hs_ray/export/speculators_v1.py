"""The older files of speculators, lists of tensors (releases before 2026-08-15): final state before the norm."""

import json
from pathlib import Path
from typing import Any

import torch

from hs_ray.export.common import Exporter, Record, Totals, write_npy_mapping, write_whole


class SpeculatorsV1Exporter(Exporter):
    name = "speculators_v1"
    norm = "pre_norm"

    def layers_note(self) -> dict[str, Any]:
        return {
            "layer_ids": [*self.choice.outputs_of, self.num_hidden_layers - 1],
            "meaning": "output of decoder layer i, from 0 (-1: embeddings); the last is the state before the norm",
            "use": "train.py --data-path FOLDER (a release of speculators before 2026-08-15)",
        }

    def file_name(self, number: int, unit: int, sample_id: str) -> str:
        return f"data_{number}.pt"

    def save(self, record: Record, path: Path) -> None:
        """input_ids, loss_mask int64 [S]; hidden_states: a list of A + 1 bf16 [S, H]."""
        states = [*record.aux, record.final]
        torch.save({"input_ids": record.input_ids, "loss_mask": record.loss_mask.long(), "hidden_states": states}, path)

    def finish(self, folder: Path, totals: Totals, draft_vocab_size: int | None) -> None:
        lengths = {str(number): length for number, length in enumerate(totals.lengths)}
        config = {
            "model_path": self.model,
            "layer_ids": self.layers_note()["layer_ids"],
            "num_samples": len(lengths),
            "hidden_size": self.hidden_size,
            "dtype": "bfloat16",
        }
        write_whole(folder, "sample_lengths.json", lambda path: path.write_text(json.dumps(lengths)))
        write_whole(folder, "data_config.json", lambda path: path.write_text(json.dumps(config, indent=1)))
        if draft_vocab_size is not None:
            write_npy_mapping(folder, totals.token_counts, draft_vocab_size)
