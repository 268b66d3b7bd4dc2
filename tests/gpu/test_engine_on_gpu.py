"""Capture on CUDA: what tests/integration/test_engine.py asks on CPU, at sizes that only a GPU has the time for.

Shared memory is poisoned (filled with NaN before use) in all of them: a row that was never copied cannot pass.
HS_RAY_TEST_DEVICE=cpu runs them without a GPU, to try the tests themselves.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from engine_process import Captured, EngineProcess, options_for

from hs_ray.schema import state_checksum

DEVICE = os.environ.get("HS_RAY_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MANY = 2000 if DEVICE == "cuda" else 40
LENGTHS = (1, 127, 128, 129, 255, 256, 257, 1500)
PLUG = 15 * 128
NOISE = 0.02  # design.md 9
BF16_SHARE = 1.5


def engine_of(folder: Path, layers: tuple[int, ...] | None = None, **changes: object) -> EngineProcess:
    return EngineProcess(options_for(folder, layers, device=DEVICE, **changes))


def prompts(vocab: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length, dtype=np.int32) for length in lengths]


def distance(one: Captured, other: Captured) -> float:
    """Largest relative error of a column."""
    pairs = zip(one.states, other.states, strict=True)
    return max(reference.error(reference.as_tensor(a), reference.as_tensor(b)) for a, b in pairs)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3", "smollm2"])
def test_agrees_with_transformers_at_every_layer_id(model: str, request: pytest.FixtureRequest) -> None:
    """By token, over all prompts, against fp32; the yardstick is transformers' own bf16 run."""
    folder: Path = request.getfixturevalue(model)
    options = options_for(folder)
    sent = prompts(options.vocab_size)
    engine = engine_of(folder)
    try:
        captured = engine.run(sent)
    finally:
        engine.close()
    ours: dict[str, list[torch.Tensor]] = {name: [] for name in options.spec.columns}
    own: dict[str, list[torch.Tensor]] = {name: [] for name in options.spec.columns}
    for prompt, result in zip(sent, captured, strict=True):
        assert result.error is None
        exact = reference.states(folder, prompt, options.spec, torch.float32)
        rounded = reference.states(folder, prompt, options.spec, torch.bfloat16)
        for name, bits, wide, bf16 in zip(options.spec.columns, result.states, exact, rounded, strict=True):
            ours[name].append(reference.by_token(reference.as_tensor(bits), wide))
            own[name].append(reference.by_token(bf16, wide))
    for name in options.spec.columns:
        found, limit = (float(torch.cat(errors).square().mean().sqrt()) for errors in (ours[name], own[name]))
        assert found <= BF16_SHARE * limit + 1e-3, f"{name}: {found:.4f}, transformers' own bf16 {limit:.4f}"


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[EngineProcess]:
    engine = engine_of(tiny_llama)
    yield engine
    engine.close()


def test_chunked_against_unchunked(tiny_llama: Path, llama: EngineProcess) -> None:
    whole = engine_of(tiny_llama, chunked_prefill_size=4096)
    try:
        unchunked = whole.run(prompts(1024))
    finally:
        whole.close()
    for one, other in zip(llama.run(prompts(1024)), unchunked, strict=True):
        assert distance(one, other) <= NOISE


def test_the_same_batches_give_the_same_bits(llama: EngineProcess) -> None:
    for first, second in zip(llama.run(prompts(1024), PLUG), llama.run(prompts(1024), PLUG), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(first.states, second.states, strict=True))


def test_one_prompt_many_times_over(llama: EngineProcess) -> None:
    prompt = prompts(1024)[4]
    (alone,) = llama.run([prompt])
    for result in llama.run([prompt] * 50):
        assert result.error is None
        assert distance(result, alone) <= NOISE


def test_many_requests_of_random_lengths_each_get_their_own_rows(tiny_llama: Path, llama: EngineProcess) -> None:
    """Every row of every request: its embedding is exact, its checksums are those taken on the device."""
    embeddings = reference.load(tiny_llama, torch.bfloat16).get_input_embeddings().weight
    rng = np.random.default_rng(3)
    lengths = np.minimum(np.exp(rng.normal(4.5, 1.2, MANY)).astype(int) + 1, 1990)
    sent = prompts(1024, tuple(int(n) for n in lengths), seed=4)
    for prompt, result in zip(sent, llama.run(sent), strict=True):
        assert result.error is None
        assert torch.equal(reference.as_tensor(result.states[0]), embeddings[prompt.astype(np.int64)].float())
        assert [state_checksum(bits) for bits in result.states] == [stats.checksum for stats in result.stats]
        assert not any(stats.nonfinite_rows or stats.zero_rows for stats in result.stats[1:])


def test_canary(llama: EngineProcess) -> None:
    passed = llama.canary()
    assert max(passed.errors.values()) <= NOISE
    alone, company, other = passed.parts
    assert sum(alone) == sum(company) == sum(other)
    assert alone != company != other != alone, "the long prompt is to be split at different places"
