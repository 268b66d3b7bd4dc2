"""What an engine is started with, and what is refused before or as it starts. Without an engine."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hs_ray.config_checks import OWNED_ENGINE_ARGS
from hs_ray.engine import arguments, canary
from hs_ray.engine.engine import EngineDiedError, HiddenStateEngine
from hs_ray.engine.options import EngineOptions, server_args
from hs_ray.engine.patching import installed_release
from hs_ray.engine.ring import ALIGN, Extent, Ring
from hs_ray.engine.ticket import SampleStates, Ticket
from hs_ray.errors import ConfigError
from hs_ray.pipeline import resources
from hs_ray.pipeline.resources import fit_ring
from hs_ray.schema import CaptureSpec, ColumnStats, resolve_layers
from hs_ray.storage import open_storage

CONTEXT = 2048
SPEC = CaptureSpec((2, 4), "pre_norm", 8, 64)  # 3 columns of 128 bytes a token


def options(**changes: Any) -> EngineOptions:
    plain = EngineOptions(
        spec=SPEC,
        architecture="LlamaForCausalLM",
        model_path="m",
        release=installed_release(),
        vocab_size=1024,
        context_length=CONTEXT,
        max_seq_len=CONTEXT,
        device="cpu",
        ring_bytes=2**30,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("max_seq_len", range(CONTEXT - 9, CONTEXT + 1))
def test_the_longest_prompt_fits_into_the_context(max_seq_len: int) -> None:
    """SGLang takes prompts shorter than min(context - 1, pool - 1) - 5."""
    args = server_args(options(max_seq_len=max_seq_len))
    context = args.get("context_length", CONTEXT)
    assert max_seq_len < context - 6 < args["max_total_tokens"] - 6
    assert context <= CONTEXT + 8


@pytest.mark.parametrize(("longest", "room"), [(994, 995), (995, 995), (2000, 995)])
def test_a_sample_longer_than_the_cache_is_refused_at_the_start(longest: int, room: int) -> None:
    closed: list[bool] = []
    sglang = SimpleNamespace(tokenizer_manager=SimpleNamespace(max_req_input_len=room))
    engine: Any = HiddenStateEngine.__new__(HiddenStateEngine)  # not started
    engine.options, engine._engine, engine.close = options(longest_tokens=longest), sglang, lambda: closed.append(True)
    if longest < room:
        HiddenStateEngine._check_room(engine)
        return
    with pytest.raises(ConfigError, match=f"the longest sample has {longest:,} tokens.*room for one of 994"):
        HiddenStateEngine._check_room(engine)
    assert closed


def test_shared_memory_is_at_most_half_of_the_node() -> None:
    asked = options(longest_tokens=1000)
    assert fit_ring(asked, 8 * 2**30) == asked
    assert fit_ring(asked, 2**30).ring_bytes == 2**29
    least = 4 * 1000 * SPEC.bytes_per_token
    assert fit_ring(asked, 2 * least).ring_bytes == least
    with pytest.raises(
        ConfigError, match=f"4 x 1,000 tokens x 384 bytes = {least:,} bytes .* its node, {2 * least - 2:,}"
    ):
        fit_ring(asked, 2 * least - 2)


def test_memory_is_the_containers_where_that_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(resources, "CGROUP_LIMITS", (str(limit), str(tmp_path / "none")))
    whole = resources.node_memory()
    assert whole > 2**30
    limit.write_text("max\n")
    assert resources.node_memory() == whole
    limit.write_text(f"{2**29}\n")
    assert resources.node_memory() == 2**29


@pytest.mark.parametrize(
    ("engines", "gpus", "tp_size", "here"), [(16, 8, 1, 8), (3, 8, 1, 3), (16, 8, 4, 2), (1, 8, 8, 1)]
)
def test_engines_that_share_a_node(
    engines: int, gpus: int, tp_size: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeID": "a", "Resources": {"GPU": 1.0}}, {"NodeID": "b", "Resources": {"GPU": float(gpus)}}]
    monkeypatch.setattr(resources.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(resources.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "b"))
    assert resources.engines_of_this_node(engines, options(device="cuda", tp_size=tp_size)) == here


@pytest.mark.parametrize(("engines", "cpus", "here"), [(2, 4, 2), (16, 4, 4), (3, 0, 1)])
def test_engines_of_a_node_without_gpus(engines: int, cpus: int, here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks Ray for a CPU: sixteen engines on four nodes are not sixteen on each."""
    nodes = [{"NodeID": "a", "Resources": {"CPU": 64.0}}, {"NodeID": "b", "Resources": {"CPU": float(cpus)}}]
    monkeypatch.setattr(resources.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(resources.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "b"))
    assert resources.engines_of_this_node(engines, options()) == here


def test_engines_that_could_fill_the_folder_for_uploads(tmp_path: Path) -> None:
    storage = open_storage("s3://bucket/out", {"scratch_dir": str(tmp_path)})
    resources.check_scratch(storage, 2**20, 2**20)
    for need, min_free in ((2**60, 0), (2**20, 2**60)):
        told = rf"scratch_dir = {tmp_path}: .*{need:,} bytes at once and output.min_free_bytes {min_free:,},"
        with pytest.raises(ConfigError, match=told):
            resources.check_scratch(storage, need, min_free)
    resources.check_scratch(open_storage(str(tmp_path)), 2**60, 0)  # made where they stay: a full disk is waited for


def test_a_folder_for_uploads_that_a_node_does_not_have(tmp_path: Path) -> None:
    """Not an outage, which running again would mend."""
    for folder in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        storage = open_storage("s3://bucket/out", {"scratch_dir": str(folder)})
        with pytest.raises(ConfigError, match=rf"scratch_dir = {folder}: no folder that node .* may write to"):
            resources.check_scratch(storage, 0, 0)


def test_every_argument_that_we_set_is_refused_from_users() -> None:
    """But for the few that change neither what is computed nor how it is captured."""
    free = {"log_level", "watchdog_timeout", "max_total_tokens"}
    for release in ("0.5.17", "0.5.23"):
        for device in ("cpu", "cuda"):
            ours = server_args(options(release=release, device=device, attention_backend="x", mem_fraction_static=0.5))
            assert ours.keys() - free <= OWNED_ENGINE_ARGS.keys()


class Dying:
    """An engine whose ring is full, and whose scheduler ends while somebody waits for room."""

    def __init__(self, on_death: Any):
        self.engine: Any = HiddenStateEngine.__new__(HiddenStateEngine)  # not started
        self.engine.options, self.engine.ring, self.engine.on_death = options(), Ring(ALIGN), on_death
        self.engine._tickets, self.engine._dead, self.engine._closing = {}, None, False
        self.engine.ring.reserve(ALIGN)


def test_who_waits_for_room_is_told_of_the_death() -> None:
    """CaptureError would be an error of the run: the unit would fail, and the death not count."""
    engine = Dying(None).engine
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.submit, np.zeros(4, np.int32))
        while engine.ring._next_turn < 2:
            time.sleep(0.001)
        engine._died("the scheduler ended")
        with pytest.raises(EngineDiedError, match="the scheduler ended"):
            waiting.result(10)


def test_the_process_ends_before_anybody_is_told() -> None:
    ticket = Ticket("r", 4, Extent(0, ALIGN), 1, 0.0)
    told: list[bool] = []
    engine = Dying(lambda _: told.append(ticket.future.done())).engine
    engine._tickets["r"] = ticket
    engine._died("the scheduler ended")
    assert told == [False]
    assert isinstance(ticket.future.exception(), EngineDiedError)


def test_a_ticket_ends_once() -> None:
    states = SampleStates([], [])
    first, second = (Ticket("r", 4, Extent(0, ALIGN), 1, 0.0) for _ in range(2))
    first.complete(states)
    first.fail(EngineDiedError("late"))
    assert first.future.result() is states
    second.fail(EngineDiedError("early"))
    second.complete(states)
    assert isinstance(second.future.exception(), EngineDiedError)


def test_arguments_that_the_installed_sglang_does_not_take() -> None:
    for device in ("cpu", "cuda"):
        given = server_args(options(device=device, attention_backend="triton", mem_fraction_static=0.8))
        arguments.check_arguments(given)
    with pytest.raises(ConfigError) as caught:
        arguments.check_arguments(["quantisation", "max-total-tokens", "xyzzy"])
    assert caught.value.problems == [
        "engine.args.quantisation: the installed SGLang has no such argument; did you mean quantization or "
        "quantization_param_path?",
        "engine.args.max-total-tokens: the installed SGLang has no such argument; did you mean max_total_tokens?",
        "engine.args.xyzzy: the installed SGLang has no such argument; `python -m sglang.launch_server --help` lists "
        "them",
    ]


class Answering:
    """An engine whose states are the tokens; what would wait for ever, and what SGLang would refuse, fails."""

    def __init__(self, asked: EngineOptions, longest_request: int = CONTEXT):
        self.options, self.longest_request = asked, longest_request
        self.ring = Ring(asked.ring_bytes)

    def submit(self, ids: np.ndarray) -> Ticket:
        assert 1 <= len(ids) <= self.longest_request
        size = -(-len(ids) * SPEC.bytes_per_token // ALIGN) * ALIGN
        assert self.ring.used + size <= self.ring.size, "waits for ever"
        ticket = Ticket("r", len(ids), self.ring.reserve(size)[0], len(SPEC.columns), 0.0)
        ticket.parts = [len(ids)]
        state = np.repeat(ids.astype(np.uint16)[:, None] + 1, SPEC.hidden_size, axis=1)
        ticket.future.set_result(SampleStates([state] * len(SPEC.columns), [ColumnStats()] * len(SPEC.columns)))
        return ticket

    def release(self, ticket: Ticket) -> None:
        self.ring.release(ticket.extent)


@pytest.mark.parametrize("chunk", [128, 2048, 16384])
@pytest.mark.parametrize("max_seq_len", [40, 500, 2048])
def test_the_canarys_company_leaves_room_for_a_part_of_the_long_prompt(chunk: int, max_seq_len: int) -> None:
    asked = options(chunked_prefill_size=chunk, max_seq_len=max_seq_len)
    engine = Answering(asked)
    long, short = canary._lengths(engine)
    assert (long, short) == (min(max_seq_len, 512, 2 * chunk + 9), 7)
    for share in canary.SHARES:
        lengths = canary._company(engine, long, short, share)
        assert len(lengths) >= 2 and min(lengths) >= 1 and max(lengths) <= max_seq_len
        room = chunk - sum(lengths) - short
        assert room == (long if long <= chunk else chunk) // share


def test_no_company_where_nothing_can_be_split() -> None:
    for changes in ({"chunked_prefill_size": -1}, {"ring_bytes": 2**19}):
        assert canary._company(Answering(options(**changes)), 512, 7, 2) == []


@pytest.mark.parametrize("longest_request", [1, 5, 593, CONTEXT])
@pytest.mark.parametrize("inflight", [4, 16, 60, 520, 2300, 4096, 18_000])
@pytest.mark.parametrize(("device", "chunk"), [("cuda", None), ("cuda", -1), ("cpu", None), ("cpu", 128)])
def test_the_canary_fits_into_a_small_engine(
    device: str, chunk: int | None, inflight: int, longest_request: int
) -> None:
    ring_bytes = inflight * SPEC.bytes_per_token
    engine = Answering(options(device=device, chunked_prefill_size=chunk, ring_bytes=ring_bytes), longest_request)
    passed = canary.check(engine)
    assert set(passed.errors.values()) == {0}
    assert engine.ring.used == 0


@pytest.mark.parametrize(("inflight", "tokens"), [(18_000, 2048), (20_000, 4096), (4096, 3993), (520, 419)])
def test_the_canarys_long_prompt_is_shorter_where_there_is_no_room(inflight: int, tokens: int) -> None:
    """It keeps its company as long as a chunk of 16,384 tokens fits, and its plug even without."""
    asked = options(device="cuda", max_seq_len=8192, ring_bytes=inflight * SPEC.bytes_per_token)
    engine = Answering(asked, 8192)
    long, short = canary._lengths(engine)
    assert (long, short) == (tokens, 7)
    assert canary._fits(engine, [canary.PLUGS[0], short, long])
    assert all(bool(canary._company(engine, long, short, share)) == (inflight > 16_384) for share in canary.SHARES)


def test_eagle3_of_six_layers_would_name_one_twice() -> None:
    assert resolve_layers("eagle3", 7) == (2, 3, 4)
    with pytest.raises(ConfigError, match="at least 7 decoder layers, this one has 6"):
        resolve_layers("eagle3", 6)
