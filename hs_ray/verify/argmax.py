"""`verify.reference=argmax`: what the model would say next, out of our final state, against what the sample says next.

`argmax(lm_head(norm(final)))` at token t is the model's choice for token t + 1. Of a trained model it is the text's own
next token far more often than any other token of the text: nearly always for answers that the model gave greedily.
States that are shifted, of other samples or normed twice lose that. Needs the output matrix alone, no second copy of
the model. A figure to look at, not a verdict: what is usual depends on model and text, and nothing of it holds for
random weights. It says nothing about the auxiliary layers (`verify.reference=hf` does).

Shapes: S tokens, H hidden_size, V vocab_size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from hs_ray.errors import ConfigError, UnsupportedError
from hs_ray.model import ModelInfo, local_weights
from hs_ray.reader import HiddenStatesDataset
from hs_ray.verify.report import ReferenceReport
from hs_ray.weights import tensor_files

OFFSETS = (-1, 0, 1, 2)  # t + 1 is the right one
BLOCK = 1024  # tokens whose logits are in memory at once


def model_folder(run: Mapping[str, Any], override: str | None) -> str:
    """The folder with the weights of the model that run.json names; fetched if it is of the hub and not here."""
    return override or local_weights(ModelInfo(**run["model"]))


def output_matrix(folder: str, name: str) -> torch.Tensor:
    """lm_head, or the embeddings where the two are tied: [V, H]. Raises UnsupportedError if there is neither."""
    files = tensor_files(Path(folder), name)
    for ending in ("lm_head.weight", "embed_tokens.weight"):
        for key in files:
            if key.endswith(ending):
                with safe_open(Path(folder) / files[key], framework="pt") as tensors:
                    return tensors.get_tensor(key)
    raise UnsupportedError(f"{name}: no lm_head.weight or embed_tokens.weight in its files")


def verify_argmax(
    path: str,
    *,
    samples: int = 16,
    seed: int = 0,
    device: str = "auto",
    incomplete: bool = False,
    model_path: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReferenceReport:
    """Compare over the learnt tokens (all, where none is) of `samples` random samples.

    The report has a table and no problems. Raises ConfigError if no final state was captured.
    """
    dataset = HiddenStatesDataset(
        path, (), incomplete=incomplete, rank=0, world_size=1, storage_options=storage_options
    )
    columns = dataset.output.spec.columns
    last = f"hidden_{dataset.output.spec.num_hidden_layers}"
    column = next((name for name in ("final_post_norm", "final_pre_norm", last) if name in columns), None)
    if column is None:
        raise ConfigError("verify.reference = argmax: needs a final state, this output has none; verify.reference=hf")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    run = dataset.output.run
    head = output_matrix(model_folder(run, model_path), run["model"]["name"]).to(device, torch.bfloat16)
    hits, tokens = dict.fromkeys(OFFSETS, 0), 0
    for number in np.sort(np.random.default_rng(seed).permutation(dataset.num_samples)[:samples]).tolist():
        sample = dataset.read(number, (column,))
        state = sample[column] if column == "final_post_norm" else dataset.to_post_norm(sample[column])
        choice = torch.cat([(block.to(device) @ head.T).argmax(-1).cpu() for block in state.split(BLOCK)])
        for offset, (right, compared) in _agreement(choice, sample["input_ids"], sample["loss_mask"]).items():
            hits[offset] += right
            tokens += compared if offset == 1 else 0
    shares = ", ".join(f"t{offset:+d} {hit / max(tokens, 1):.1%}" for offset, hit in hits.items())
    table = [f"{column}: the model's choice for token t + 1 is the text's token at {shares}; right states: mostly t+1"]
    return ReferenceReport(counts={"tokens_compared": tokens}, table=table)


def _agreement(choice: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[int, tuple[int, int]]:
    """How often choice[t] is ids[t + offset], of how many t, where ids[t + 1] is learnt. All int [S]."""
    learnt = torch.zeros_like(ids, dtype=torch.bool)
    learnt[:-1] = mask[1:].bool()
    if not learnt.any():
        learnt[:-1] = True
    learnt[:1], learnt[-2:] = False, False  # so that every offset is there
    at = torch.nonzero(learnt).flatten()
    return {offset: (int((choice[at] == ids[at + offset]).sum()), len(at)) for offset in OFFSETS}
