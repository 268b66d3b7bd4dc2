"""Makes SpecForge run without a GPU when imported, before specforge itself.

Its loss is a Triton kernel; what stands in for it computes the same (to 1e-3 over 30 steps, against Triton's
interpreter, which would cost 1 GB and minutes).
"""

import os
import sys
from types import ModuleType

os.environ |= {"SPECFORGE_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1", "SPECFORGE_VALIDATE_OFFLINE_FEATURES": "1"}

import torch
import torch._inductor
import transformers  # noqa: F401  (the same)


class LogSoftmaxLoss:
    """logits, target [B, S, V], position_mask [B, S, 1] -> cross entropy, the mean over positions."""

    @staticmethod
    def apply(logits: torch.Tensor, target: torch.Tensor, position_mask: torch.Tensor) -> torch.Tensor:
        log_probabilities = torch.log_softmax(logits.float(), dim=-1)
        return -(position_mask * target * log_probabilities).sum(-1).mean()


triton, language = ModuleType("triton"), ModuleType("triton.language")
triton.jit = lambda function: function
triton.language = language
language.__getattr__ = lambda name: None  # annotations of the kernels' arguments
sys.modules |= {"triton": triton, "triton.language": language}

import specforge.algorithms.eagle3.model as eagle3  # noqa: E402

eagle3.LogSoftmaxLoss = LogSoftmaxLoss
