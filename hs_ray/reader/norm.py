"""The model's final norm, out of `_run/final_norm.safetensors`: turns `final_pre_norm` into `final_post_norm`.

The file holds the tensor `weight` [H] and the metadata `eps` and `kind`. The formulas are those of transformers
(LlamaRMSNorm, Gemma2RMSNorm, torch.nn.LayerNorm), rounded where they round: a bf16 result is bit-equal to theirs.
"""

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from hs_ray.errors import OutputError, ShardError
from hs_ray.reader.run import load_json
from hs_ray.schema import FINAL_NORM, MANIFEST
from hs_ray.storage import Storage
from hs_ray.weights import norm_digest


@dataclass(frozen=True)
class FinalNorm:
    """weight: [H]; kind: rms_norm, rms_norm_plus_one (x * (1 + weight)) or layer_norm (without bias)."""

    weight: torch.Tensor
    eps: float
    kind: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """pre-norm [..., H] -> post-norm [..., H], same dtype and device."""
        weight = self.weight.to(x.device)
        if self.kind == "layer_norm":
            return torch.nn.functional.layer_norm(x, x.shape[-1:], weight.to(x.dtype), None, self.eps)
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "rms_norm":
            return weight.to(x.dtype) * wide.to(x.dtype)
        return (wide * (1.0 + weight.to(torch.float32))).to(x.dtype)


def load_final_norm(storage: Storage) -> FinalNorm:
    """Raises OutputError if the run kept none, or one of a kind that this release does not know; ShardError if it is
    damaged, or not the one that the manifest names."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    name = f"{storage.root}/{FINAL_NORM}"
    if not storage.exists(FINAL_NORM):
        raise OutputError(f"{name}: missing; without it pre-norm states cannot become post-norm ones")
    try:
        data = storage.read_bytes(FINAL_NORM)
    except IsADirectoryError:
        raise ShardError(f"{name}: a folder where a file should be") from None
    try:
        metadata = _metadata(data)
        norm = FinalNorm(load(data)["weight"], float(metadata["eps"]), metadata["kind"])
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"{name}: damaged ({error!r})") from None
    if norm.kind not in ("rms_norm", "rms_norm_plus_one", "layer_norm"):
        raise OutputError(f"{name}: norm of unknown kind {norm.kind!r}")
    digest = norm_digest(norm.weight, norm.eps, norm.kind)
    recorded = metadata.get("sha256")  # files of earlier releases have none
    if recorded not in (None, digest):
        raise ShardError(f"{name}: damaged, its weight, eps or kind is not what was written ({recorded[:16]}...)")
    named = _of_the_run(storage)
    if named not in (None, digest):
        raise ShardError(
            f"{name}: not the norm of this run, {MANIFEST} names {str(named)[:16]}...; run the same "
            "extraction again, which writes it anew"
        )
    return norm


def _of_the_run(storage: Storage) -> Any:
    """The norm's digest by the manifest; None before there is one, and of earlier releases."""
    with contextlib.suppress(ShardError):  # who opens the output is told of a damaged one
        return (load_json(storage, MANIFEST) or {}).get("final_norm")
    return None


def _metadata(data: bytes) -> dict[str, str]:
    """`__metadata__` of a safetensors file: an 8-byte little-endian length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, dict[str, str]] = json.loads(data[8 : 8 + length])
    return header["__metadata__"]
