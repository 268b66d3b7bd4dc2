"""What an engine is started with, and what is refused before or as it starts. Without an engine."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hs_ray.engine import arguments, canary
from hs_ray.engine.engine import HiddenStateEngine
from hs_ray.engine.options import EngineOptions, server_args
from hs_ray.engine.patching import installed_release
from hs_ray.errors import ConfigError
from hs_ray.pipeline.resources import fit_ring
from hs_ray.schema import CaptureSpec, resolve_layers

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
    engine: Any = SimpleNamespace(
        options=options(longest_tokens=longest), _engine=sglang, close=lambda: closed.append(True)
    )
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
        ConfigError, match=f"4 x 1,000 tokens x 384 bytes = {least:,} bytes .* node's {2 * least - 2:,}"
    ):
        fit_ring(asked, 2 * least - 2)


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


@pytest.mark.parametrize("chunk", [128, 2048, 16384])
@pytest.mark.parametrize("max_seq_len", [40, 500, 2048])
def test_the_canarys_company_leaves_room_for_a_part_of_the_long_prompt(chunk: int, max_seq_len: int) -> None:
    asked = options(chunked_prefill_size=chunk, max_seq_len=max_seq_len)
    engine: Any = SimpleNamespace(options=asked, ring=SimpleNamespace(size=asked.ring_bytes))
    long, short = min(max_seq_len, 512), 7
    for share in canary.SHARES:
        lengths = [len(prompt) for prompt in canary._company(engine, np.random.default_rng(0), long, short, share)]
        assert len(lengths) >= 2 and min(lengths) >= 1 and max(lengths) <= max_seq_len
        room = chunk - sum(lengths) - short
        assert room == (long if long <= chunk else chunk) // share


def test_no_company_where_nothing_can_be_split() -> None:
    rng = np.random.default_rng(0)
    for changes in ({"chunked_prefill_size": -1}, {"ring_bytes": 2**20}):
        asked = options(**changes)
        engine: Any = SimpleNamespace(options=asked, ring=SimpleNamespace(size=asked.ring_bytes))
        assert canary._company(engine, rng, 512, 7, 2) == []


def test_eagle3_of_six_layers_would_name_one_twice() -> None:
    assert resolve_layers("eagle3", 7) == (2, 3, 4)
    with pytest.raises(ConfigError, match="at least 7 decoder layers, this one has 6"):
        resolve_layers("eagle3", 6)
