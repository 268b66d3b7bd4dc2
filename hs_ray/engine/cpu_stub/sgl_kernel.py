"""Stand-in for SGLang's CUDA kernels where they cannot load (no libcuda): importable, and nothing more.

On CPU SGLang imports names from `sgl_kernel` and falls back to PyTorch wherever prefill would call them, so
a call that reaches this module is a fault and raises.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called on CPU, where SGLang's kernels are not loaded")

    return absent
