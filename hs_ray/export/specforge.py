"""SpecForge 0.2, offline EAGLE-3: one `.ckpt` a sample, final state after the norm, exactly three auxiliary layers.

Format: specforge/runtime/data_plane/offline_reader.py, algorithms/eagle3/data.py.
"""

from pathlib import Path
from typing import Any

import torch

from hs_ray.export.common import Exporter, Record, Totals, vocab_mapping, write_whole
from hs_ray.schema import unit_name


class SpecForgeExporter(Exporter):
    name = "specforge"
    norm = "post_norm"

    def problems(self) -> list[str]:
        found = super().problems()
        if self.choice.layers and len(self.choice.layers) != 3:
            found.append(f"takes exactly three auxiliary layers, the output has {list(self.choice.layers)}")
        if 0 in self.choice.layers:
            found.append("cannot name layer id 0, the embeddings")
        return found

    def layers_note(self) -> dict[str, Any]:
        return {
            "eagle_aux_hidden_state_layer_ids": self.choice.outputs_of,
            "meaning": "output of decoder layer i, counted from 0; hidden_state is the final state, after the norm",
            "use": "eagle_config.eagle_aux_hidden_state_layer_ids as here; data.hidden_states_path: FOLDER/data",
        }

    def file_name(self, number: int, unit: int, sample_id: str) -> str:
        return f"data/{unit_name(unit)}/data_{number:09d}.ckpt"  # the reader sorts by path

    def save(self, record: Record, path: Path) -> None:
        """input_ids, loss_mask int64 [S]; aux_hidden_state bf16 [1, S, 3H]; hidden_state bf16 [1, S, H]."""
        torch.save(
            {
                "input_ids": record.input_ids,
                "loss_mask": record.loss_mask.long(),
                "aux_hidden_state": torch.cat(record.aux, dim=-1)[None],
                "hidden_state": record.final[None],
            },
            path,
        )

    def finish(self, folder: Path, totals: Totals, draft_vocab_size: int | None) -> None:
        if draft_vocab_size is not None:
            d2t, t2d = vocab_mapping(totals.token_counts, draft_vocab_size)
            write_whole(
                folder, "vocab_mapping/vocab_mapping.pt", lambda path: torch.save({"d2t": d2t, "t2d": t2d}, path)
            )
