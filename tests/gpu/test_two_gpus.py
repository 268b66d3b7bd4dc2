"""Tensor parallel on two GPUs: the states of one, and an end for both ranks when one is killed."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from engine_process import EngineProcess, options_for

from hs_ray.prove.shapes import SHAPES
from hs_ray.prove.twin import make_twin

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


@pytest.fixture(scope="module")
def small_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLA and MoE: Kimi-K2.5's language model in small."""
    folder = tmp_path_factory.mktemp("kimi")
    make_twin(SHAPES["kimi_k25"]["text_config"], folder, tp_size=2)
    return folder


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3", "small_kimi"])
def test_two_ranks_give_the_states_of_one(model: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    found = []
    for tp_size in (1, 2):
        engine = EngineProcess(options_for(folder, tp_size=tp_size, device="cuda", chunked_prefill_size=8192))
        try:
            found.append([engine.run(batch) for batch in batches()])
        finally:
            engine.close()
        assert engine.process.exitcode == 0
    spec = options_for(folder).spec
    for batch, alone, both in zip(batches(), *found, strict=True):
        assert all(result.error is None for result in [*alone, *both])
        exact = [reference.states(folder, prompt, spec, torch.float32) for prompt in batch]
        rounded = [reference.states(folder, prompt, spec, torch.bfloat16) for prompt in batch]
        for index, name in enumerate(spec.columns):
            wide, bf16 = (torch.cat([states[index] for states in each]) for each in (exact, rounded))
            one, two = (torch.cat([reference.as_tensor(each.states[index]) for each in run]) for run in (alone, both))
            limit = BF16_SHARE * noise(bf16, wide) + 1e-3
            where = f"{name}, {len(wide)} tokens"
            assert noise(two, wide) <= limit, f"{where}: {noise(two, wide):.4f} > {limit:.4f}"
            assert noise(two, one) <= max(NOISE, limit), f"{where}: {noise(two, one):.4f} from one rank"


def noise(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square over tokens: MoE routing flips at ties, so single tokens may differ by more."""
    return float(reference.by_token(ours, exact).square().mean().sqrt())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_engine(rank: int, tiny_llama: Path) -> None:
    engine = EngineProcess(options_for(tiny_llama, tp_size=2, device="cuda"))
    assert engine.run(batches()[0])[0].error is None
    os.kill(engine.find(f"sglang::scheduler_TP{rank}"), signal.SIGKILL)
    engine.process.join(60)
    assert engine.process.exitcode is not None, "it hangs"
    assert engine.process.exitcode < 0
