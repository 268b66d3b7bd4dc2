"""Checks of one row's states: what can be wrong with an array without knowing the right one.

Shapes: S tokens, H hidden_size. States are bf16 bits, uint16 [S, H].
"""

import numpy as np
import torch

from hs_ray.schema import ColumnStats


def measure(bits: np.ndarray) -> ColumnStats:
    """Statistics of one column, made from the values alone (the writer's own are made elsewhere, by other code)."""
    values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    absmax = values.abs().amax(dim=1)  # NaN wins over every number
    finite = torch.isfinite(absmax)
    squares = values.square_().sum(dim=1, dtype=torch.float64)[finite]
    return ColumnStats(
        rows=len(bits),
        sum_squares=float(squares.sum()),
        absmax=float(absmax[finite].max()) if bool(finite.any()) else 0.0,
        nonfinite_rows=int((~finite).sum()),
        zero_rows=int((absmax == 0).sum()),
    )


def stats_differ(found: ColumnStats, recorded: ColumnStats) -> str | None:
    """How recomputed statistics differ from a marker's; None if they agree. Only sums may be rounded differently."""
    for name in ("rows", "nonfinite_rows", "zero_rows", "absmax"):
        if getattr(found, name) != getattr(recorded, name):
            return f"{name} is {getattr(found, name):g}, the marker says {getattr(recorded, name):g}"
    if abs(found.sum_squares - recorded.sum_squares) > 1e-5 * max(abs(found.sum_squares), abs(recorded.sum_squares)):
        return f"sum of squares is {found.sum_squares:.8g}, the marker says {recorded.sum_squares:.8g}"
    return None


def repeated_rows(bits: np.ndarray, input_ids: np.ndarray) -> tuple[int, int] | None:
    """Two tokens of a sample that differ and yet have the same state; None if there are none.

    The same token over and over repeats its state rightly (attention over equal values is that value), so only
    different tokens count. Not for layer id 0, where unused tokens may share an embedding.
    """
    if len(bits) < 2:
        return None
    width = min(bits.shape[1], 4)
    key = bits[:, :width].astype(np.uint64) @ (np.uint64(1) << (np.uint64(16) * np.arange(width, dtype=np.uint64)))
    order = np.argsort(key, kind="stable")
    for at in np.flatnonzero(key[order][1:] == key[order][:-1]):  # candidates: equal in the first channels
        a, b = int(order[at]), int(order[at + 1])
        if input_ids[a] != input_ids[b] and bits[a].any() and np.array_equal(bits[a], bits[b]):
            return a, b
    return None


def shared_prefix(ids: list[np.ndarray]) -> list[int]:
    """For each sample the length of the longest prefix that it shares with another of the list."""
    order = sorted(range(len(ids)), key=lambda i: ids[i].tolist())
    shared = [0] * len(ids)
    for a, b in zip(order, order[1:], strict=False):
        length = min(len(ids[a]), len(ids[b]))
        differ = np.flatnonzero(ids[a][:length] != ids[b][:length])
        common = int(differ[0]) if len(differ) else length
        shared[a], shared[b] = max(shared[a], common), max(shared[b], common)
    return shared
