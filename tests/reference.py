"""transformers' states of a prompt at every layer id: what capture is compared with."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hs_ray.schema import CaptureSpec


@cache
def load(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)


def states(
    folder: Path, prompt: np.ndarray, spec: CaptureSpec, dtype: torch.dtype, device: str = "cpu"
) -> list[torch.Tensor]:
    """float32 [S, H] a column of the spec, in its order, on the CPU wherever they were computed."""
    model = load(folder, dtype, device)
    kept: dict[str, torch.Tensor] = {}
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.__setitem__("pre", args[0]))
    try:
        with torch.no_grad():
            ids = torch.from_numpy(prompt.astype(np.int64))[None].to(device)
            out = model(ids, output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    by_id = {i: out.hidden_states[i][0] for i in range(spec.num_hidden_layers)}
    by_id[spec.num_hidden_layers] = kept["pre"][0]
    finals = {"final_pre_norm": kept["pre"][0], "final_post_norm": out.hidden_states[-1][0]}
    names = spec.columns
    chosen = [by_id[int(n.removeprefix("hidden_"))] if n.startswith("hidden_") else finals[n] for n in names]
    return [state.float().cpu() for state in chosen]


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """||ours - reference|| / ||reference||"""
    return float((ours - reference).norm() / reference.norm())


def by_token(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The relative error of every token: [S]."""
    return (ours - reference).norm(dim=-1) / reference.norm(dim=-1)


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    """bf16 bits, uint16 -> float32."""
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).float()
