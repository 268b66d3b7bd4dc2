"""The statistics of rows: torch's against numpy, the CUDA kernel (in triton's interpreter) against torch's."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hs_ray.engine import row_statistics
from hs_ray.engine.row_statistics import MAX_WIDTH
from hs_ray.schema import state_checksum

T, H = 37, 300  # no power of two: the kernel's last lanes lie outside


def columns() -> list[torch.Tensor]:
    """Contiguous, slices of a wider tensor, columns of a transposed one; NaN, both infinities, a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    plain, transposed, wide = (
        torch.randn(shape, generator=generator).mul(100).bfloat16() for shape in ((T, H), (H, T), (T, 3 * H))
    )
    found = [plain, *wide.split(H, dim=-1), transposed.T]
    for column in found:
        column[5, 7], column[6, 0], column[9, H - 1] = torch.nan, torch.inf, -torch.inf
        column[8] = 0
        column[10] = -3.0  # no positive number
    return found


def bits(column: torch.Tensor) -> np.ndarray:
    return column.contiguous().view(torch.int16).numpy().view(np.uint16)


def test_of_a_request() -> None:
    found = columns()
    start, row, count = 1000, 4, 20
    for column, stats in zip(found, row_statistics.of_rows(found).of(row, count, start), strict=True):
        part = column[row : row + count].double().numpy()
        finite = np.isfinite(part).all(axis=1)
        squares, absmax, nonfinite, zero, checksum = stats
        assert squares == pytest.approx((part[finite] ** 2).sum(), rel=1e-5)
        assert absmax == np.abs(part[finite]).max()
        assert (nonfinite, zero) == (3, 1)
        # As the file will be read: the same rows as tokens of a longer sample, all others zero.
        whole = np.zeros((start + count, H), dtype=np.uint16)
        whole[start:] = bits(column)[row : row + count]
        assert checksum == state_checksum(whole)


INTERPRETED = """
import sys, torch
from hs_ray.engine.row_kernel import of_rows
columns = torch.load(sys.argv[1])
packed, found = of_rows(columns)
torch.save([packed, found.norms, found.peaks, found.sums, [a is b for a, b in zip(packed, columns)]], sys.argv[1])
"""


def interpreted(found: list[torch.Tensor], folder: Path) -> list[Any]:
    """The CUDA kernel on CPU tensors, in a process whose triton interprets: it decides when it is imported."""
    pytest.importorskip("triton")
    path = folder / "columns.pt"
    torch.save(found, path)  # strides are kept
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED, path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(torch.load(path))


def on_cuda(found: list[torch.Tensor], _: Path) -> list[Any]:
    """The kernel as it is used."""
    from hs_ray.engine.row_kernel import of_rows

    there = [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device="cuda").copy_(c) for c in found]
    packed, stats = of_rows(there)
    same = [mine is column for mine, column in zip(packed, there, strict=True)]
    return [[mine.cpu() for mine in packed], stats.norms.cpu(), stats.peaks.cpu(), stats.sums.cpu(), same]


CUDA = pytest.param(
    on_cuda, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.mark.parametrize("run", [interpreted, CUDA])
def test_the_kernel_gives_the_same_and_packs(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    found = columns()
    packed, norms, peaks, sums, same = run(found, tmp_path)
    expected = row_statistics.of_rows(found)
    torch.testing.assert_close(norms, expected.norms, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(peaks.nan_to_num(-1), expected.peaks.nan_to_num(-1))
    assert torch.equal(sums, expected.sums)
    assert sums.dtype == torch.int64
    assert same == [column.is_contiguous() for column in found]  # nothing is copied without need
    for mine, column in zip(packed, found, strict=True):
        assert mine.is_contiguous()
        assert np.array_equal(bits(mine), bits(column))


@pytest.mark.parametrize("run", [interpreted, CUDA])
def test_the_kernel_sums_the_widest_row(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    lowest = torch.full((1, MAX_WIDTH), -(2**15), dtype=torch.int16).view(torch.bfloat16)
    assert run([lowest], tmp_path)[3].item() == -(2**15) * MAX_WIDTH
