"""What stands in for SGLang's kernels on CPU: the matrix product, and an engine's share of the cores."""

import importlib.util
import os
import sys
from types import ModuleType

import pytest
import torch

from hs_ray.engine import cpu


@pytest.fixture(scope="module")
def stand_in() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_in", f"{cpu.STUB}/sgl_kernel.py")
    assert spec is not None and spec.loader is not None
    before = torch.nn.functional.linear
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.nn.functional.linear = before  # in its own process alone
    return module


@pytest.mark.parametrize("rows", [1, 7, 8, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_a_bf16_product_is_the_exact_one_rounded_once(stand_in: ModuleType, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(33, 96).bfloat16()
    added = torch.randn(33).bfloat16() if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    ours = stand_in.linear(x, weight, added)
    assert ours.dtype == torch.bfloat16 and ours.shape == (rows, 33)
    # Half a unit in the last place of bf16 (8 bits), and of the bias added after a first rounding in PyTorch's own.
    assert torch.all((ours.double() - exact).abs() <= exact.abs() * 2**-8 + 2**-7)


def test_another_dtype_is_left_alone(stand_in: ModuleType) -> None:
    x, weight = torch.randn(20, 96), torch.randn(33, 96)
    assert torch.equal(stand_in.linear(x, weight), torch.nn.functional.linear(x, weight))


def test_a_call_of_any_other_kernel_raises(stand_in: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.moe_align was called on CPU"):
        stand_in.moe_align(1)


@pytest.mark.parametrize(("engines", "share"), [(1, 1.0), (2, 0.5), (10_000, 0.0)])
def test_engines_share_the_cores(engines: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cpu.use_cores(engines)
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, int(len(os.sched_getaffinity(0)) * share))


@pytest.mark.parametrize(("cores", "expected"), [({0, 1}, "0|1"), ({0, 1, 2, 3, 8}, "0,2,8|1,3"), ({5}, "5|5")])
def test_ranks_share_the_cores(cores: set[int], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang wants a NUMA node a rank, unless it is told the cores of each."""
    for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_NCCL_SO_PATH", "SGLANG_CPU_OMP_THREADS_BIND", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    cpu.prepare(tp_size=2)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == expected
