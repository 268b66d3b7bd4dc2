"""NVIDIA Model-Optimizer 0.47, offline EAGLE-3: one `.pt` a sample, final state after the norm.

Format: modelopt/torch/speculative/eagle/utils.py. Its reader takes every `*.pt` below the folder that it is given, so
nothing but samples lies under `data/`.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import torch

from hs_ray.export.common import Exporter, Record, Totals, vocab_mapping, write_whole
from hs_ray.schema import unit_name

PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
MAX_NAME_BYTES = 200  # of the 255 that file systems allow; ours in the making have some more


class ModelOptExporter(Exporter):
    name = "modelopt"
    norm = "post_norm"

    def problems(self) -> list[str]:
        return super().problems() + (["cannot name layer id 0, the embeddings"] if 0 in self.choice.layers else [])

    def layers_note(self) -> dict[str, Any]:
        return {
            "eagle_aux_hidden_state_layer_ids": self.choice.outputs_of,
            "meaning": "output of decoder layer i, counted from 0; hidden_states is the final state, after the norm",
            "use": "eagle_config.eagle_aux_hidden_state_layer_ids as here; data.offline_data_path=FOLDER/data",
        }

    def file_name(self, number: int, unit: int, sample_id: str) -> str:
        """The stem is the conversation's id, as in its own dumps; a hash of an id that is no file name."""
        plain = PLAIN_NAME.fullmatch(sample_id) and len(sample_id.encode()) <= MAX_NAME_BYTES
        stem = sample_id if plain else hashlib.sha256(sample_id.encode()).hexdigest()[:32]
        return f"data/{unit_name(unit)}/{stem}.pt"

    def save(self, record: Record, path: Path) -> None:
        """input_ids, loss_mask int64 [S]; hidden_states bf16 [S, H]; aux_hidden_states bf16 [S, A * H]."""
        torch.save(
            {
                "input_ids": record.input_ids,
                "loss_mask": record.loss_mask.long(),
                "hidden_states": record.final.clone(),
                "aux_hidden_states": torch.cat(record.aux, dim=-1),
                "conversation_id": record.sample_id,
            },
            path,
        )

    def finish(self, folder: Path, totals: Totals, draft_vocab_size: int | None) -> None:
        if draft_vocab_size is not None:
            d2t, _ = vocab_mapping(totals.token_counts, draft_vocab_size)
            write_whole(folder, "d2t.pt", lambda path: torch.save(d2t, path))
