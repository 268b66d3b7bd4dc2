"""The final norm: its file, which no state passes on its way into a shard, and the states before and after it."""

import math

import numpy as np
import torch

from hs_ray.errors import OutputError, ShardError
from hs_ray.reader import FinalNorm, load_final_norm
from hs_ray.schema import FINAL_NORM, CaptureSpec
from hs_ray.storage import Storage
from hs_ray.verify.report import Report
from hs_ray.verify.rows import to_float

TOKENS = 64  # of a row that are compared; a mistake of the capture is in all of them
# Relative difference of a state from the norm of the one before it. Both are rounded to bf16, and SGLang's fused kernel
# takes the norm of the sum before it is rounded: 0.005. Another token's state differs by 1 and more.
LIMIT = 0.05


def check_final_norm(storage: Storage, spec: CaptureSpec, report: Report) -> FinalNorm | None:
    """The norm, if there is one that can be applied. Its problems go into the report.

    It has to be there where `final_pre_norm` was captured; a model whose norm no reader could apply has none, and is
    captured with post_norm.
    """
    if not storage.exists(FINAL_NORM):
        if "final_pre_norm" in spec.columns:
            report.add("norm", FINAL_NORM, "missing; without it pre-norm states cannot become post-norm ones")
        return None
    try:
        norm = load_final_norm(storage)  # which compares the digest that the file carries
    except (OutputError, ShardError) as error:
        report.add("norm", FINAL_NORM, f"cannot be used ({error})")
        return None
    if wrong := _wrong(norm, spec.hidden_size):
        report.add("norm", FINAL_NORM, wrong)
        return None
    return norm


def _wrong(norm: FinalNorm, hidden_size: int) -> str | None:
    """Why the norm cannot be applied to states [S, hidden_size]."""
    if tuple(norm.weight.shape) != (hidden_size,) or not norm.weight.is_floating_point():
        return f"its weight is {norm.weight.dtype} {list(norm.weight.shape)}, the states have width {hidden_size}"
    bad = int((~torch.isfinite(norm.weight)).sum())
    if bad:
        return f"{bad} of {hidden_size} weights are NaN or infinite"
    if not (math.isfinite(norm.eps) and norm.eps >= 0):
        return f"its eps is {norm.eps}"
    return None


def norm_error(norm: FinalNorm, pre: np.ndarray, post: np.ndarray) -> tuple[int, float]:
    """(token, its relative difference): where `post` is farthest from the norm of `pre`, both uint16 [S, H]."""
    chosen = np.unique(np.linspace(0, len(pre) - 1, TOKENS).astype(int))
    before, after = (torch.from_numpy(to_float(bits[chosen])) for bits in (pre, post))
    expected = norm(before)
    difference = (after - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    worst = int(difference.nan_to_num(0.0).argmax())  # a NaN is told by a check of its own
    return int(chosen[worst]), float(difference[worst])
