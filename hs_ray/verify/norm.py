"""The final norm's file: no state passes through it on its way into a shard, so it has checks of its own."""

import json
import math

import torch
from safetensors import SafetensorError

from hs_ray.errors import HsRayError
from hs_ray.reader import FinalNorm, load_final_norm
from hs_ray.schema import FINAL_NORM, CaptureSpec
from hs_ray.storage import Storage
from hs_ray.verify.report import Report
from hs_ray.weights import norm_digest


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
        norm, recorded = load_final_norm(storage), _recorded_digest(storage)
    except (HsRayError, SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        report.add("norm", FINAL_NORM, f"cannot be read ({type(error).__name__}: {error})")
        return None
    if wrong := _wrong(norm, spec.hidden_size):
        report.add("norm", FINAL_NORM, wrong)
        return None
    if recorded not in (None, norm_digest(norm.weight, norm.eps, norm.kind)):
        report.add("norm", FINAL_NORM, f"its weight, eps or kind is not what was written ({str(recorded)[:16]}...)")
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


def _recorded_digest(storage: Storage) -> str | None:
    """`sha256` in the file's metadata: None in files that were written before there was one."""
    data = storage.read_bytes(FINAL_NORM)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found: str | None = header.get("__metadata__", {}).get("sha256")
    return found
