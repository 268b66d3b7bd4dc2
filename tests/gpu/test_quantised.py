"""Weights in FP8 and INT4: the states are bf16 all the same, and those of the model that the weights stand for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from engine_process import Captured, EngineProcess, options_for
from quantise import write_int4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16_SHARE = 1.5
FP8_NOISE = 0.25  # 3 bits of mantissa, in weights and in what they are multiplied with; seen: 0.156 after 4 layers


@pytest.fixture(scope="module")
def plain(make_tiny: Callable[..., Path]) -> Path:
    """Wide enough for the kernels: they work in blocks of 128."""
    from transformers import LlamaConfig

    return make_tiny(LlamaConfig, hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_hidden_layers=4)


def run(folder: Path, prompts: list[np.ndarray], **args: object) -> list[Captured]:
    options = options_for(folder, device="cuda", args=args, chunked_prefill_size=512)
    engine = EngineProcess(options)
    try:
        return engine.run(prompts)
    finally:
        engine.close()


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 1024, length, dtype=np.int32) for length in (1, 64, 700)]


def test_fp8(plain: Path) -> None:
    """Every state is nearest to the right layer's, embeddings are exact."""
    spec = options_for(plain).spec
    for prompt, result in zip(prompts(), run(plain, prompts(), quantization="fp8"), strict=True):
        assert result.error is None
        exact = reference.states(plain, prompt, spec, torch.float32)
        layers = exact[: spec.num_hidden_layers + 1]
        for index, bits in enumerate(result.states[: len(layers)]):
            errors = [reference.error(reference.as_tensor(bits), state) for state in layers]
            assert int(np.argmin(errors)) == index
            assert errors[index] <= (FP8_NOISE if index else 0), [f"{error:.3f}" for error in errors]


def test_int4(plain: Path, tmp_path: Path) -> None:
    """Against transformers with the same weights multiplied out: no further from them than bf16 is."""
    write_int4(plain, tmp_path / "int4", tmp_path / "plain")
    spec = options_for(plain).spec
    for prompt, result in zip(prompts(), run(tmp_path / "int4", prompts()), strict=True):
        assert result.error is None
        exact = reference.states(tmp_path / "plain", prompt, spec, torch.float32)
        rounded = reference.states(tmp_path / "plain", prompt, spec, torch.bfloat16)
        for name, bits, wide, own in zip(spec.columns, result.states, exact, rounded, strict=True):
            found, limit = reference.error(reference.as_tensor(bits), wide), reference.error(own, wide)
            assert found <= BF16_SHARE * limit + 1e-3, f"{name}: {found:.4f}, transformers' own bf16 {limit:.4f}"
