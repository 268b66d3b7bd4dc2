"""Checks of one row's states: what can be wrong with an array without knowing the right one.

Shapes: S tokens, H hidden_size. States are bf16 bits, uint16 [S, H].
"""

import numpy as np

from hs_ray.schema import ColumnStats

BLOCK = 64  # tokens at a time: their values stay in the cache
MAGNITUDE, INFINITY = np.uint16(0x7FFF), np.uint16(0x7F80)  # of bf16 bits; a NaN is above the infinity


def measure(bits: np.ndarray) -> ColumnStats:
    """Statistics of one column, made from the values alone (the writer's own are made elsewhere, by other code).

    numpy, block by block: shards are checked in threads of their own, and torch's would get in each other's way.
    """
    peaks = np.concatenate([(bits[at : at + BLOCK] & MAGNITUDE).max(axis=1) for at in range(0, len(bits), BLOCK)])
    finite = peaks < INFINITY
    squares = 0.0
    for at in range(0, len(bits), BLOCK):
        values = to_float(bits[at : at + BLOCK])[finite[at : at + BLOCK]]
        squares += float(np.einsum("sh,sh->s", values, values).sum(dtype=np.float64))
    return ColumnStats(
        rows=len(bits),
        sum_squares=squares,
        absmax=float(to_float(peaks[finite].max(keepdims=True))[0]) if finite.any() else 0.0,
        nonfinite_rows=int((~finite).sum()),
        zero_rows=int((peaks == 0).sum()),
    )


def to_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits, uint16 -> float32, same shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


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
