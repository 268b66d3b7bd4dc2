"""What every export shares: the choice of columns, the checks that no trainer makes, files that are whole or not there.

Shapes: S tokens, A auxiliary layers, H hidden_size.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from hs_ray.errors import ConfigError, OutputError, ShardError
from hs_ray.reader import Output
from hs_ray.schema import FINAL_NORM, STATE_BYTES

Norm = Callable[[torch.Tensor], torch.Tensor]  # final_pre_norm [S, H] -> final_post_norm
TMP = ".hs_ray_tmp"  # in the target folder; no trainer looks for names like that


@dataclass(frozen=True)
class Choice:
    """Which columns feed a trainer: `aux` by ascending layer id, and the state after the last layer."""

    layers: tuple[int, ...]  # ids of aux
    pre_norm: str | None  # final_pre_norm, or hidden_N; None if neither was captured
    post_norm: bool  # final_post_norm was captured
    can_norm: bool  # the final norm is there, so that pre-norm can become post-norm

    @classmethod
    def of(cls, output: Output) -> "Choice":
        """Layer id N is the state after the last layer, not an auxiliary one, as in vLLM and speculators."""
        spec, last = output.spec, output.spec.num_hidden_layers
        pre_norm = next((name for name in ("final_pre_norm", f"hidden_{last}") if name in spec.columns), None)
        aux = tuple(layer for layer in spec.layers if layer != last)
        return cls(aux, pre_norm, "final_post_norm" in spec.columns, output.storage.exists(FINAL_NORM))

    @property
    def aux(self) -> tuple[str, ...]:
        return tuple(f"hidden_{layer}" for layer in self.layers)

    @property
    def outputs_of(self) -> list[int]:
        """The other spelling of the layers: the 0-based decoder layer whose output each one is (-1: the embeddings)."""
        return [layer - 1 for layer in self.layers]


@dataclass(frozen=True)
class Record:
    """One sample for a trainer: input_ids int64 [S], loss_mask uint8 [S], aux A of bf16 [S, H], final bf16 [S, H]."""

    number: int  # in the export, from 0
    sample_id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: list[torch.Tensor]
    final: torch.Tensor


@dataclass
class Totals:
    """What an export holds. token_counts int64 [vocab_size]: how often each token is learnt (loss_mask 1)."""

    lengths: list[int] = field(default_factory=list)
    token_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class Exporter(ABC):
    """One trainer's format. Picklable: worker processes get a copy."""

    name: ClassVar[str]
    norm: ClassVar[str]  # what the trainer expects of the final state: pre_norm or post_norm

    def __init__(self, choice: Choice, output: Output):
        self.choice = choice
        self.vocab_size: int = output.run["model"]["vocab_size"]
        self.hidden_size, self.num_hidden_layers = output.spec.hidden_size, output.spec.num_hidden_layers
        self.model: str = output.run["model"]["name"]
        problems = self.problems()
        if problems:
            raise ConfigError([f"export.to = {self.name}: {problem}" for problem in problems])

    def problems(self) -> list[str]:
        """Why the trainer could not use this output, and what to do; nothing if it can."""
        choice, found = self.choice, []
        if not choice.layers:
            found.append("needs auxiliary layers, the output has none; extract with layers=eagle3")
        if self.norm == "pre_norm" and choice.pre_norm is None:
            found.append(
                "needs the final state before the norm, which was not captured; extract with capture.final=pre_norm"
            )
        if self.norm == "post_norm" and not choice.post_norm and not (choice.pre_norm and choice.can_norm):
            found.append(
                "needs the final state after the norm; extract with capture.final=post_norm, or pre_norm for both kinds"
            )
        return found

    @property
    def final_column(self) -> str:
        if self.norm == "post_norm" and self.choice.post_norm:
            return "final_post_norm"
        return str(self.choice.pre_norm)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.choice.aux, self.final_column)

    @property
    def needs_norm(self) -> bool:
        return self.norm == "post_norm" and self.final_column != "final_post_norm"

    def sample_bytes(self, tokens: int) -> int:
        """About the size of a sample's file: states, int64 ids, mask."""
        return tokens * (len(self.columns) * self.hidden_size * STATE_BYTES + 16) + 2048

    @abstractmethod
    def layers_note(self) -> dict[str, Any]:
        """The layers in the trainer's own spelling, and how to hand them to it."""

    @abstractmethod
    def file_name(self, number: int, unit: int, sample_id: str) -> str:
        """Where a sample's file goes, relative to the target folder."""

    @abstractmethod
    def save(self, record: Record, path: Path) -> None:
        """Write a sample's file."""

    def finish_unit(self, folder: Path, unit: int, samples: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Files that belong to a unit, when all its samples are there. A sample: number, input_ids, loss_mask."""

    def finish(self, folder: Path, totals: Totals, draft_vocab_size: int | None) -> None:  # noqa: B027
        """Files that belong to the whole export."""

    def record(self, number: int, sample: dict[str, Any], norm: Norm | None) -> Record:
        """Check a sample and put it together. Raises ShardError for what a trainer would swallow silently."""
        check_sample(sample, self.columns, self.hidden_size, self.vocab_size)
        final = sample[self.final_column]
        if norm is not None:
            final = norm(final)
        aux = [sample[name] for name in self.choice.aux]
        return Record(number, sample["sample_id"], sample["input_ids"], sample["loss_mask"], aux, final)


def check_sample(sample: dict[str, Any], columns: Sequence[str], hidden_size: int, vocab_size: int) -> None:
    """Rows, width, NaN, infinities, zeros, token ids: the trainers' readers accept all of these when wrong."""
    name, ids = sample["sample_id"], sample["input_ids"]
    if len(ids) == 0 or len(sample["loss_mask"]) != len(ids):
        raise ShardError(f"sample {name!r}: {len(ids)} tokens, {len(sample['loss_mask'])} loss_mask")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ShardError(
            f"sample {name!r}: token ids {int(ids.min())}..{int(ids.max())}, the model has 0..{vocab_size - 1}"
        )
    for column in columns:
        state = sample[column]
        if state.shape != (len(ids), hidden_size) or state.dtype != torch.bfloat16:
            raise ShardError(
                f"sample {name!r}, column {column}: {state.dtype} {list(state.shape)}, "
                f"bfloat16 [{len(ids)}, {hidden_size}] is needed"
            )
        peaks = (state.view(torch.uint16).numpy() & 0x7FFF).max(axis=1)  # bits without the sign order like magnitudes
        if (peaks >= 0x7F80).any():
            raise ShardError(f"sample {name!r}, column {column}: NaN or infinity")
        if column != "hidden_0" and not peaks.all():
            raise ShardError(f"sample {name!r}, column {column}: a token's state is all zero")


def write_whole(folder: Path, name: str, write: Any) -> None:
    """`write(path)` into a temporary file, then move it to `folder/name`: a file with its name is whole.

    Raises OutputError if the disk does not take it.
    """
    target = folder / name
    temporary = folder / TMP / f"{os.getpid()}-{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.parent.mkdir(exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise OutputError(
            f"export.path = {folder}: {name} cannot be written ({error.strerror or error}); make room or choose "
            f"another folder, and run the same command again"
        ) from error


def write_npy_mapping(folder: Path, token_counts: np.ndarray, draft_vocab_size: int) -> None:
    """`d2t.npy`, `t2d.npy`: the vocabulary mapping as speculators reads it."""
    d2t, t2d = vocab_mapping(token_counts, draft_vocab_size)
    for name, values in (("d2t.npy", d2t.numpy()), ("t2d.npy", t2d.numpy())):
        write_whole(folder, name, lambda path, values=values: _save_npy(path, values))


def _save_npy(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as file:  # given a name, numpy would add `.npy` to it
        np.save(file, values)


def vocab_mapping(token_counts: np.ndarray, draft_vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft vocabulary of the most frequent learnt tokens, ties by id.

    Returns d2t int64 [draft_vocab_size], target id minus draft id, and t2d bool [vocab_size], the chosen ones: the
    meaning that SpecForge, speculators and Model-Optimizer share.
    """
    chosen = np.sort(np.argsort(-token_counts, kind="stable")[:draft_vocab_size])
    t2d = np.zeros(len(token_counts), dtype=bool)
    t2d[chosen] = True
    return torch.from_numpy(chosen - np.arange(draft_vocab_size)), torch.from_numpy(t2d)
