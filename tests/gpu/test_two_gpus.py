"""Tensor parallel on two GPUs: the states of one, and an end for both ranks when one is killed."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from engine_process import EngineProcess, options_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
BF16_SHARE = 1.5
NOISE = 0.02  # design.md 9


def batches() -> list[list[np.ndarray]]:
    """Under and over the 2,048 tokens up to which SGLang may fuse an all-reduce into the norm after it."""
    rng = np.random.default_rng(6)
    return [
        [rng.integers(0, 1024, length, dtype=np.int32) for length in lengths]
        for lengths in ([1, 7, 300], [1900, 147], [1900, 149], [1999, 1999, 1500])
    ]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3"])
def test_two_ranks_give_the_states_of_one(model: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    changes = {
        "device": "cuda",
        "attention_backend": "triton",
        "mem_fraction_static": 0.3,
        "chunked_prefill_size": 8192,
    }
    found = []
    for tp_size in (1, 2):
        engine = EngineProcess(options_for(folder, tp_size=tp_size, **changes))
        try:
            found.append([engine.run(batch) for batch in batches()])
        finally:
            engine.close()
        assert engine.process.exitcode == 0
    spec = options_for(folder).spec
    for batch, alone, both in zip(batches(), *found, strict=True):
        for prompt, one, two in zip(batch, alone, both, strict=True):
            assert one.error is None
            assert two.error is None
            exact = reference.states(folder, prompt, spec, torch.float32)
            rounded = reference.states(folder, prompt, spec, torch.bfloat16)
            for name, a, b, wide, own in zip(spec.columns, one.states, two.states, exact, rounded, strict=True):
                limit = BF16_SHARE * reference.error(own, wide) + 1e-3
                error = reference.error(reference.as_tensor(b), wide)
                assert error <= limit, f"{name} of {len(prompt)} tokens: {error:.4f} > {limit:.4f}"
                assert reference.error(reference.as_tensor(b), reference.as_tensor(a)) <= NOISE


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_engine(rank: int, tiny_llama: Path) -> None:
    engine = EngineProcess(options_for(tiny_llama, tp_size=2, device="cuda"))
    assert engine.run(batches()[0])[0].error is None
    os.kill(engine.find(f"sglang::scheduler_TP{rank}"), signal.SIGKILL)
    engine.process.join(60)
    assert engine.process.exitcode is not None, "it hangs"
    assert engine.process.exitcode < 0
