"""The final norm's file: no state passes through it on its way into a shard, so it has checks of its own."""

import math

import torch

from hs_ray.errors import OutputError, ShardError
from hs_ray.reader import FinalNorm, load_final_norm
from hs_ray.schema import FINAL_NORM, CaptureSpec
from hs_ray.storage import Storage
from hs_ray.verify.report import Report


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
