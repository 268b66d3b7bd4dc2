"""Stand-in for SGLang's CUDA kernels where they cannot load (no libcuda): importable, and one kernel.

On CPU SGLang imports names from `sgl_kernel` and falls back to PyTorch wherever prefill would call them, so
a call that reaches this module is a fault and raises. What it does give is a matrix product: PyTorch's own in
bf16 takes a scalar path on a CPU without AVX-512, seven times slower than the same product in fp32.
"""

from typing import Any

import torch
from torch.nn import functional

MIN_ROWS = 8  # under it the conversion of the weight costs more than the product

_linear = functional.linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """functional.linear; a bf16 product is summed in fp32, as PyTorch does, and rounded once at the end."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or x.numel() < MIN_ROWS * x.shape[-1]:
        return _linear(x, weight, bias)
    return _linear(x.float(), weight.float(), None if bias is None else bias.float()).to(torch.bfloat16)


if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    # Ignored: PyTorch calls the first parameter `input`, a builtin's name; SGLang passes it by place.
    functional.linear = linear  # type: ignore[assignment]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called on CPU, where SGLang's kernels are not loaded")

    return absent
