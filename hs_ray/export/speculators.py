"""speculators 0.9: `hidden_states/hs_{i}.safetensors` beside a `datasets` folder; final state before the norm.

The folder is what `datasets.Dataset.save_to_disk` makes (an Arrow stream file a unit, `state.json`,
`dataset_info.json`), written with pyarrow: memory stays bounded, and `datasets` is not needed.
Format: speculators/train/data.py, hs_connectors/transfer.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from hs_ray.export.common import Exporter, Record, Totals, write_npy_mapping, write_whole

TABLE = pa.schema([("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())])
FEATURES = {
    "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
}


class SpeculatorsExporter(Exporter):
    name = "speculators"
    norm = "pre_norm"

    def layers_note(self) -> dict[str, Any]:
        ids = " ".join(str(layer) for layer in self.choice.layers)
        return {
            "target_layer_ids": list(self.choice.layers),
            "meaning": "input of decoder layer i, as in vLLM; the last slot is the final state, before the norm",
            "use": f"speculators train --data-path FOLDER --on-missing raise --target-layer-ids {ids}",
        }

    def file_name(self, number: int, unit: int, sample_id: str) -> str:
        return f"hidden_states/hs_{number}.safetensors"

    def save(self, record: Record, path: Path) -> None:
        """hidden_states bf16 [S, A + 1, H], token_ids int64 [S]."""
        states = torch.stack([*record.aux, record.final], dim=1)
        save_file({"hidden_states": states, "token_ids": record.input_ids}, path)

    def finish_unit(self, folder: Path, unit: int, samples: Sequence[dict[str, Any]]) -> None:
        rows = [
            {
                "input_ids": s["input_ids"].numpy(),
                "loss_mask": s["loss_mask"].numpy().astype(np.int64),
                "seq_len": len(s["input_ids"]),
            }
            for s in samples
        ]

        def write(path: Path) -> None:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, TABLE) as writer:
                writer.write_table(pa.Table.from_pylist(rows, schema=TABLE))

        write_whole(folder, _table_name(unit), write)

    def finish(self, folder: Path, totals: Totals, draft_vocab_size: int | None) -> None:
        files = sorted(path.name for path in folder.glob("data-unit-*.arrow"))
        state = {
            "_data_files": [{"filename": name} for name in files],
            "_fingerprint": folder.name,
            "_format_columns": ["input_ids", "loss_mask", "seq_len"],
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
        write_whole(folder, "dataset_info.json", lambda path: path.write_text(json.dumps(info)))
        write_whole(folder, "state.json", lambda path: path.write_text(json.dumps(state)))
        seen = np.flatnonzero(totals.token_counts)
        frequencies = {int(token): int(totals.token_counts[token]) for token in seen}
        write_whole(folder, "token_freq.pt", lambda path: torch.save(frequencies, path))
        if draft_vocab_size is not None:
            write_npy_mapping(folder, totals.token_counts, draft_vocab_size)


def _table_name(unit: int) -> str:
    return f"data-unit-{unit:06d}.arrow"
