"""What the check scripts share. They run in a trainer's environment: torch is there, hs_ray is not.

python check_TRAINER.py MODEL EXPORT RESULT     # RESULT: a folder for the drafter and result.json
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

STEPS = 30
DRAFT_VOCAB = 256
LAYER_IDS = [2, 15, 27]  # layers=eagle3 of SmolLM2's 30


def arguments() -> tuple[Path, Path, Path]:
    """The model's folder, the export's, and one for results."""
    model, export, result = (Path(argument) for argument in sys.argv[1:])
    result.mkdir(parents=True, exist_ok=True)
    return model, export, result


def agreement(choices: list[torch.Tensor], ids: list[torch.Tensor], masks: list[torch.Tensor]) -> float:
    """How often the choice at token t is token t + 1, where that one is learnt. int64 [S] each, one a sample."""
    right = total = 0
    for choice, tokens, mask in zip(choices, ids, masks, strict=True):
        learnt = mask[1:].bool()
        right += int((choice[:-1] == tokens[1:])[learnt].sum())
        total += int(learnt.sum())
    return right / total


def train(parameters: Any, loss_of: Callable[[], torch.Tensor], learning_rate: float = 1e-3) -> list[float]:
    """STEPS steps on one batch; the loss of each."""
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=learning_rate)
    losses = []
    for step in range(STEPS):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def report(result: Path, packages: list[str], **values: Any) -> None:
    found = {"versions": {name: version(name) for name in packages}, **values}
    (result / "result.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
