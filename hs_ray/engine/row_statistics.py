"""Of every row of a batch, on its device: norm, largest value, sum of bits. Of one request's rows, on the host.

Taken before the first copy, where they cost next to nothing: whatever goes wrong on the way to the file shows
against them. T rows of a batch, C state columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hs_ray.schema import weighted_checksum

MAX_WIDTH = 65_536  # channels of a row: the sum of so many int16 fits into the int32 of `row_kernel`


@dataclass
class RowStatistics:
    norms: torch.Tensor  # float32 [C, T]: L2 norm of a row
    peaks: torch.Tensor  # float32 [C, T]: its largest absolute value; NaN or inf: the row is not finite
    sums: torch.Tensor  # int64 [C, T]: the sum of its bits as int16

    def to_host(self) -> "RowStatistics":
        """Copies in pinned memory, complete once the current stream is."""
        return RowStatistics(*(_to_pinned(tensor) for tensor in (self.norms, self.peaks, self.sums)))

    def of(self, row: int, count: int, start: int) -> list[list[float]]:
        """Of rows [row, row + count), a request's tokens from `start` on; on the host.

        One [sum_squares, absmax, nonfinite_rows, zero_rows, checksum] a column.
        """
        part = slice(row, row + count)
        norms, peaks, sums = (t[:, part].numpy() for t in (self.norms, self.peaks, self.sums))
        finite = np.isfinite(peaks)
        squares = np.where(finite, norms.astype(np.float64) ** 2, 0.0).sum(axis=1)
        absmax = np.where(finite, peaks, 0.0).max(axis=1)
        return [
            [float(squares[c]), float(absmax[c]), int((~finite[c]).sum()), int((peaks[c] == 0).sum()), checksum]
            for c, checksum in enumerate(weighted_checksum(row_sums, start) for row_sums in sums)
        ]


def of_rows(columns: Sequence[torch.Tensor]) -> RowStatistics:
    """columns: C bf16 tensors [T, H]. On any device; `row_kernel` is the faster one on CUDA."""
    return RowStatistics(
        norms=torch.stack([torch.linalg.vector_norm(c, dim=-1, dtype=torch.float32) for c in columns]),
        peaks=torch.stack([torch.linalg.vector_norm(c, ord=torch.inf, dim=-1, dtype=torch.float32) for c in columns]),
        sums=torch.stack([c.contiguous().view(torch.int16).sum(-1, dtype=torch.int64) for c in columns]),
    )


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
