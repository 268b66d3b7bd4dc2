"""Tensors that lie side by side: those of a sample, and those of a batch.

A DataLoader worker hands over every storage by a file descriptor of its own, which takes longer than reading a short
sample's states. What a worker hands over, a sample or a batch, is therefore views of one storage, in shared memory from
the start: one descriptor and no copy.

Shapes: B samples of a batch, S tokens of its longest sample, H hidden_size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from hs_ray.reader.order import Place

Sample = dict[str, Any]
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
ALIGNMENT = 64  # bytes


def empty_tensors(layout: Layout, shared: bool) -> dict[str, torch.Tensor]:
    """A tensor for each (shape, dtype), not initialised. shared: views of one storage in shared memory."""
    if not shared:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()]
    places = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    room = torch.empty(0, dtype=torch.uint8)
    room.set_(torch.UntypedStorage._new_shared(sum(places)))
    tensors = {}
    for (name, (shape, dtype)), size, part in zip(layout.items(), sizes, room.split(places), strict=True):
        tensors[name] = part[:size].view(dtype).view(shape)
    return tensors


def collate(samples: Sequence[Sample]) -> Sample:
    """Samples -> one batch, padded with zeros on the right to its longest sample.

    input_ids int64 [B, S], loss_mask uint8 [B, S], attention_mask bool [B, S], num_tokens int64 [B], states bfloat16
    [B, S, H]; `sample_id`, `source` and `line` are lists.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    count, longest = len(samples), max(lengths)
    padded = {name: first for name, first in samples[0].items() if isinstance(first, torch.Tensor)}
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((count, longest, *first.shape[1:]), first.dtype) for name, first in padded.items()
    }
    layout |= {"attention_mask": ((count, longest), torch.bool), "num_tokens": ((count,), torch.int64)}
    worker = get_worker_info()
    tensors = empty_tensors(layout, shared=worker is not None)
    for name in padded:
        for row, value in zip(tensors[name], (sample[name] for sample in samples), strict=True):
            row[: len(value)], row[len(value) :] = value, 0
    tensors["num_tokens"].copy_(torch.tensor(lengths))
    torch.lt(torch.arange(longest), tensors["num_tokens"][:, None], out=tensors["attention_mask"])
    if isinstance(place := getattr(worker and worker.dataset, "place", None), Place):
        place.saw_batch(count)
    lists = {name: [sample[name] for sample in samples] for name in samples[0] if name not in padded}
    return lists | tensors
