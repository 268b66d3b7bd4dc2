"""Capture on the real engine: every token of every prompt, at every layer id, whatever the company and the chunks."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from engine_process import Captured, EngineProcess, Failing, Killed, options_for

from hs_ray.schema import state_checksum

pytestmark = pytest.mark.integration

LENGTHS = (1, 127, 128, 129, 255, 256, 257, 1500)  # around the chunk of 128 tokens, and many chunks
PLUG = 15 * 128  # tokens that go first where batches have to be the same ones
NOISE = 0.02  # design.md 9: chunked against unchunked, batched against alone
BF16_SHARE = 1.5  # of transformers' own bf16 error against fp32


def prompts(vocab: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length, dtype=np.int32) for length in lengths]


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(options_for(tiny_llama))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def together(llama: EngineProcess) -> list[Captured]:
    return llama.run(prompts(1024), PLUG)


def check_against_transformers(folder: Path, captured: list[Captured], sent: list[np.ndarray]) -> None:
    spec = options_for(folder).spec
    for prompt, result in zip(sent, captured, strict=True):
        assert result.error is None
        exact = reference.states(folder, prompt, spec, torch.float32)
        rounded = reference.states(folder, prompt, spec, torch.bfloat16)
        for name, bits, wide, own in zip(spec.columns, result.states, exact, rounded, strict=True):
            assert bits.shape == (len(prompt), spec.hidden_size)
            limit = BF16_SHARE * reference.error(own, wide) + 1e-3
            found = reference.error(reference.as_tensor(bits), wide)
            assert found <= limit, f"{name} of {len(prompt)} tokens: {found:.4f} > {limit:.4f}"


def test_llama_agrees_with_transformers_at_every_layer_id(tiny_llama: Path, together: list[Captured]) -> None:
    check_against_transformers(tiny_llama, together, prompts(1024))


def test_checksums_from_the_device_fit_what_arrived(together: list[Captured]) -> None:
    for result in together:
        assert [state_checksum(bits) for bits in result.states] == [stats.checksum for stats in result.stats]
        assert all(stats.rows == len(result.states[0]) for stats in result.stats)


def test_the_same_batches_give_the_same_bits(llama: EngineProcess, together: list[Captured]) -> None:
    for first, second in zip(together, llama.run(prompts(1024), PLUG), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(first.states, second.states, strict=True))


def test_alone_is_as_in_company(llama: EngineProcess, together: list[Captured]) -> None:
    for prompt, result in zip(prompts(1024), together, strict=True):
        (alone,) = llama.run([prompt])
        for ours, theirs in zip(result.states, alone.states, strict=True):
            assert reference.error(reference.as_tensor(ours), reference.as_tensor(theirs)) <= NOISE


def test_one_prompt_many_times_over_is_whole_each_time(llama: EngineProcess, together: list[Captured]) -> None:
    """What a prefix cache would shorten: every copy has every token."""
    prompt, expected = prompts(1024)[4], together[4]
    for result in llama.run([prompt] * 12):
        assert result.error is None
        for ours, theirs in zip(result.states, expected.states, strict=True):
            assert ours.shape == theirs.shape
            assert reference.error(reference.as_tensor(ours), reference.as_tensor(theirs)) <= NOISE


def test_canary_passes(llama: EngineProcess) -> None:
    passed = llama.canary()
    assert max(passed.errors.values()) <= NOISE
    alone, company, other = passed.parts
    assert sum(alone) == sum(company) == sum(other)
    assert alone != company != other != alone, "the long prompt is to be split at different places"


def test_many_random_prompts_each_get_their_own_rows(tiny_llama: Path, llama: EngineProcess) -> None:
    """The embeddings (layer id 0) are exact: a row of another prompt, or of another place, cannot hide."""
    embeddings = reference.load(tiny_llama, torch.bfloat16).get_input_embeddings().weight
    rng = np.random.default_rng(3)
    sent = prompts(1024, tuple(int(n) for n in rng.integers(1, 200, 150)), seed=4)
    for prompt, result in zip(sent, llama.run(sent), strict=True):
        assert result.error is None
        assert torch.equal(reference.as_tensor(result.states[0]), embeddings[prompt.astype(np.int64)].float())


def test_overlap_off_gives_the_same_bits(tiny_llama: Path, together: list[Captured]) -> None:
    engine = EngineProcess(options_for(tiny_llama, args={"disable_overlap_schedule": True}))
    try:
        for ours, theirs in zip(engine.run(prompts(1024), PLUG), together, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours.states, theirs.states, strict=True))
    finally:
        engine.close()


def test_qwen3_agrees_with_transformers_at_every_layer_id(tiny_qwen3: Path) -> None:
    engine = EngineProcess(options_for(tiny_qwen3))
    try:
        check_against_transformers(tiny_qwen3, engine.run(prompts(1024)), prompts(1024))
    finally:
        engine.close()


def test_two_ranks_agree_with_transformers_and_end_together(tiny_llama: Path) -> None:
    """Tensor parallel, through gloo: rank 0 alone copies. A rank that is killed takes the whole engine with it."""
    engine = EngineProcess(options_for(tiny_llama, tp_size=2))
    check_against_transformers(tiny_llama, engine.run(prompts(1024)), prompts(1024))
    os.kill(engine.find("sglang::scheduler_TP1"), signal.SIGKILL)
    engine.process.join(60)
    assert engine.process.exitcode is not None, "it hangs"
    assert engine.process.exitcode < 0


def test_a_scheduler_killed_while_it_starts_is_an_engine_that_died(tiny_llama: Path) -> None:
    """The out-of-memory killer's way: an actor starts anew then, which it does not after an error of its own."""
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(EngineProcess, options_for(tiny_llama))
        os.kill(scheduler_about_to_start(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="EngineDiedError: the SGLang scheduler process was killed"):
            starting.result()


def test_a_rank_killed_while_it_starts_is_a_death_whatever_the_other_raises(tiny_llama: Path) -> None:
    """If the other has started, SGLang ends the engine's process for what it raises: to an actor the same death."""
    with pytest.raises((RuntimeError, EOFError)) as caught:
        EngineProcess(options_for(tiny_llama, tp_size=2), Killed)
    if caught.type is RuntimeError:
        assert str(caught.value).startswith("EngineDiedError: the SGLang scheduler process was killed")


def test_what_the_user_must_change_is_raised_by_the_engine_that_cannot_start(tiny_llama: Path) -> None:
    """SGLang would end the engine's process, and the job load the model three times to say that an engine died."""
    with pytest.raises(RuntimeError, match="UnsupportedError: NoSuchModel: no capture entry for SGLang"):
        EngineProcess(options_for(tiny_llama, architecture="NoSuchModel"))


def test_what_any_rank_raises_while_it_starts_is_raised_and_is_no_death(tiny_llama: Path) -> None:
    """Rank 1 raises; rank 0 has started by then or is about to, and neither its errors nor its end may be told."""
    words = r"EngineStartError: SGLang's scheduler of rank 1 raised.*RuntimeError: there is no room \("
    with pytest.raises(RuntimeError, match=words):
        EngineProcess(options_for(tiny_llama, tp_size=2), Failing)


def scheduler_about_to_start() -> int:
    """Pid of the first process that a new engine's process spawns."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for engine in multiprocessing.active_children():
            tasks = Path(f"/proc/{engine.pid}/task").glob("*/children")
            pids = sorted(int(pid) for task in tasks for pid in task.read_text().split())
            words = {}
            for pid in pids:
                with contextlib.suppress(OSError):  # a child that is gone again: the janitor detaches itself
                    words[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
            spawned = [pid for pid, line in words.items() if b"spawn_main" in line]
            if spawned and not any(b"sglang::" in line for line in words.values()):
                time.sleep(0.5)  # a child looks like its parent until it executes a program of its own, `lscpu` say
                with contextlib.suppress(OSError):
                    if b"spawn_main" in Path(f"/proc/{spawned[0]}/cmdline").read_bytes():
                        return spawned[0]
        time.sleep(0.05)  # nothing tells of a process's children
    raise TimeoutError("no engine has begun to start")


@pytest.mark.cluster  # minutes: one engine takes 20 s of two cores
def test_twenty_engines_that_start_four_at_a_time(tiny_llama: Path) -> None:
    """They share this machine's ports, /dev/shm and abstract sockets; each answers for itself, with the same bits."""
    prompt = prompts(1024)[3]

    def start_and_run(number: int) -> Captured:
        engine = EngineProcess(options_for(tiny_llama))
        try:
            own = np.full(50 + number, number, np.int32)
            mine, shared = engine.run([own])[0], engine.run([prompt])[0]
            assert [len(state) for state in mine.states] == [len(own)] * len(mine.states)
            return shared
        finally:
            engine.close()

    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(start_and_run, range(20)))
    for result in seen:
        assert result.error is None
        assert all(np.array_equal(a, b) for a, b in zip(result.states, seen[0].states, strict=True))


def test_requests_that_sglang_refuses_cost_no_one_else(tiny_llama: Path) -> None:
    """Their shared memory comes back: two of them would have been more than an engine may lose."""
    spec = options_for(tiny_llama).spec
    too_long = prompts(1024, (1500,))[0]
    ring = 4 * len(too_long) * spec.bytes_per_token
    engine = EngineProcess(options_for(tiny_llama, args={"max_total_tokens": 1000}, ring_bytes=ring))
    others = prompts(1024, (50, 129, 300))
    try:
        results = engine.run([others[0], too_long, others[1], too_long, too_long, others[2]])
    finally:
        engine.close()
    assert [(result.error or "")[:12] for result in results] == [
        "",
        "RequestError",
        "",
        "RequestError",
        "RequestError",
        "",
    ]
    check_against_transformers(tiny_llama, [result for result in results if result.error is None], others)


def test_a_prefix_cache_forced_on_is_caught(tiny_llama: Path) -> None:
    """`engine.args` refuses it; forced on underneath, the tokens that were not computed are missed, not invented."""
    options = options_for(tiny_llama, args={"disable_radix_cache": False})
    engine = EngineProcess(options)
    prompt = prompts(1024)[5]
    try:
        (first,) = engine.run([prompt])
        (second,) = engine.run([prompt])
    finally:
        engine.close()
    assert first.error is None
    assert second.error is not None
    assert second.error.startswith("CaptureError")
    assert "tokens were not computed" in second.error
