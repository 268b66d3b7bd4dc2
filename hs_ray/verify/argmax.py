"""`verify.reference=argmax`: what the model would say next, out of our final state.

Against the text: `argmax(lm_head(norm(final)))` at token t is the model's choice for token t + 1. Of a trained model it
is the text's own next token far more often than any other token of the text: nearly always for answers that the model
gave greedily. States that are shifted, of other samples or normed twice lose that. A figure to look at: what is usual
depends on model and text, and nothing of it holds for random weights.

Against the engine: the log-probability that our state gives to each next token, and the one that SGLang gives itself.
That is a verdict, for any weights, unless the model does something to its logits that a product does not.

Needs the output matrix alone, no second copy of the model, and says nothing about the auxiliary layers
(`verify.reference=hf` does).

Shapes: S tokens, H hidden_size, V vocab_size.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from hs_ray.errors import ConfigError, UnsupportedError
from hs_ray.model import ModelInfo, local_weights, text_part
from hs_ray.reader import HiddenStatesDataset
from hs_ray.verify.logprobs import engine_logprobs
from hs_ray.verify.report import ReferenceReport
from hs_ray.weights import tensor_files

OFFSETS = (-1, 0, 1, 2)  # t + 1 is the right one
LIMIT = 0.5  # nats, median: bf16 logits of 20 are 0.06 apart; another token's state, or norm, is off by several
SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "dim_model_base")
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
    logprobs: bool = True,
    device: str = "auto",
    incomplete: bool = False,
    model_path: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReferenceReport:
    """Compare over the learnt tokens (all, where none is) of `samples` random samples, and over all with the engine.

    logprobs: start the engine too. Raises ConfigError if no final state was captured.
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
    folder = model_folder(run, model_path)
    head = output_matrix(folder, run["model"]["name"]).to(device, torch.bfloat16)
    hits, tokens = dict.fromkeys(OFFSETS, 0), 0
    prompts, ours = [], []
    for number in np.sort(np.random.default_rng(seed).permutation(dataset.num_samples)[:samples]).tolist():
        sample = dataset.read(number, (column,))
        state = sample[column] if column == "final_post_norm" else dataset.to_post_norm(sample[column])
        ids = sample["input_ids"]
        choice, found = _predictions(state, ids, head)
        prompts.append(ids.numpy().astype(np.int32))
        ours.append(found.numpy())
        for offset, (right, compared) in _agreement(choice, ids, sample["loss_mask"]).items():
            hits[offset] += right
            tokens += compared if offset == 1 else 0
    shares = ", ".join(f"t{offset:+d} {hit / max(tokens, 1):.1%}" for offset, hit in hits.items())
    table = [f"{column}: the model's choice for token t + 1 is the text's token at {shares}; right states: mostly t+1"]
    report = ReferenceReport(counts={"tokens_compared": tokens}, table=table)
    if logprobs:
        theirs = engine_logprobs(run, dataset.output.spec, folder, device, prompts)
        _compare(report, column, np.concatenate(ours), np.concatenate(theirs), scaled=_scaled(folder))
    return report


def _predictions(state: torch.Tensor, ids: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [S, H], int [S], bf16 [V, H] -> the likeliest next tokens int64 [S]; log p(ids[t + 1]) float32 [S - 1]."""
    choices, logprobs = [], []
    following = torch.cat([ids[1:], ids[:1]]).long()  # the last has none
    for block, right in zip(state.split(BLOCK), following.split(BLOCK), strict=True):
        logits = (block.to(head.device) @ head.T).float()
        choices.append(logits.argmax(-1).cpu())
        logprobs.append(logits.log_softmax(-1).gather(1, right[:, None].to(head.device))[:, 0].cpu())
    return torch.cat(choices), torch.cat(logprobs)[:-1]


def _compare(report: ReferenceReport, column: str, ours: np.ndarray, theirs: np.ndarray, scaled: Sequence[str]) -> None:
    """float32 [tokens] in nats. A problem unless they agree, or the model scales its logits."""
    report.count("logprobs_compared", len(ours))
    if not len(ours):
        return
    differences = np.abs(ours - theirs)
    median, most = np.median(differences), np.quantile(differences, 0.99)
    report.table.append(
        f"{column}: log-probability of the next token against the engine's own: median difference {median:.3f}, "
        f"99% within {most:.3f} nats ({LIMIT:g} allowed for the median)"
    )
    if scaled:
        report.table.append(f"  no verdict: the model has {', '.join(scaled)}, which our product does not apply")
    elif not median <= LIMIT:  # also NaN
        detail = f"log-probabilities are {median:.3f} nats from the engine's own (median), {LIMIT:g} allowed"
        report.add("logprobs", column, detail)


def _scaled(folder: str) -> list[str]:
    """The keys of the model's config by which its logits are not lm_head's product alone."""
    config = json.loads((Path(folder) / "config.json").read_text())
    config = {**config, **text_part(config)}
    return [key for key in SCALED if config.get(key) not in (None, 1, 1.0)]


def _agreement(choice: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict[int, tuple[int, int]]:
    """How often choice[t] is ids[t + offset], of how many t, where ids[t + 1] is learnt. All int [S]."""
    learnt = torch.zeros_like(ids, dtype=torch.bool)
    learnt[:-1] = mask[1:].bool()
    if not learnt.any():
        learnt[:-1] = True
    learnt[:1], learnt[-2:] = False, False  # so that every offset is there
    at = torch.nonzero(learnt).flatten()
    return {offset: (int((choice[at] == ids[at + offset]).sum()), len(at)) for offset in OFFSETS}
