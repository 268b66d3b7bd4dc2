"""Messages, conversations and texts: what a record becomes, and with which code it is rejected."""

import json
from typing import Any

import pytest
from inputs_tokenizers import byte_tokenizer

from hs_ray.inputs import TokenizeSettings
from hs_ray.inputs.chat import ChatEncoder
from hs_ray.inputs.messages import REASONING_KEYS, conversation
from hs_ray.inputs.records import Rejected
from hs_ray.inputs.samples import SampleParser

U = {"role": "user", "content": "Q"}
A = {"role": "assistant", "content": "A"}


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def nested(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


thinking = A | dict.fromkeys(REASONING_KEYS, "R")

NORMALISED: list[tuple[str, str, dict[str, Any], list[dict[str, Any]]]] = [
    ("plain", "messages", {"messages": [U, A]}, [U, A]),
    ("extra keys are left", "messages", {"messages": [U | {"weight": 1}, A | {"refusal": None}]}, [U, A]),
    (
        "developer",
        "messages",
        {"messages": [{"role": "developer", "content": "S"}, U, A]},
        [{"role": "developer", "content": "S"}, U, A],
    ),
    (
        "text parts",
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, A]},
        [{"role": "user", "content": "ab"}, A],
    ),
    ("reasoning_content", "messages", {"messages": [U, A | {"reasoning_content": "R"}]}, [U, thinking]),
    ("thinking", "messages", {"messages": [U, A | {"thinking": "R"}]}, [U, thinking]),
    ("reasoning", "messages", {"messages": [U, A | {"reasoning": "R"}]}, [U, thinking]),
    ("empty reasoning is none", "messages", {"messages": [U, A | {"reasoning_content": ""}]}, [U, A]),
    (
        "arguments as an object",
        "messages",
        {"messages": [U, call(name="f", arguments={"a": 1})]},
        [U, nested({"a": 1})],
    ),
    (
        "arguments as text",
        "messages",
        {"messages": [U, call(name="f", arguments='{"a": 98765432109876543210}')]},
        [U, nested({"a": 98765432109876543210})],
    ),
    ("arguments empty", "messages", {"messages": [U, call(name="f", arguments="")]}, [U, nested({})]),
    ("no arguments", "messages", {"messages": [U, call(name="f")]}, [U, nested({})]),
    (
        "a flat tool call",
        "messages",
        {
            "messages": [
                U,
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "name": "f", "arguments": {}}]},
            ]
        },
        [U, nested({})],
    ),
    (
        "the old function_call",
        "messages",
        {
            "messages": [
                U,
                {"role": "assistant", "content": None, "function_call": {"id": "c", "name": "f", "arguments": "{}"}},
            ]
        },
        [U, nested({})],
    ),
    (
        "tool result",
        "messages",
        {"messages": [U, A, {"role": "tool", "content": "T", "tool_call_id": "c", "name": "f"}]},
        [U, A, {"role": "tool", "content": "T", "tool_call_id": "c", "name": "f"}],
    ),
    (
        "content missing beside calls",
        "messages",
        {"messages": [U, {"role": "assistant", "tool_calls": [{"id": "c", "name": "f"}]}]},
        [U, nested({})],
    ),
    (
        "ShareGPT",
        "conversations",
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        [U, A],
    ),
    (
        "ShareGPT, other names",
        "conversations",
        {"conversations": [{"from": "user", "value": "Q"}, {"from": "chatgpt", "value": "A"}]},
        [U, A],
    ),
    (
        "ShareGPT with a system key",
        "conversations",
        {"system": "S", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        [{"role": "system", "content": "S"}, U, A],
    ),
    (
        "ShareGPT with a system turn",
        "conversations",
        {"system": "x", "conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]},
        [{"role": "system", "content": "S"}, U],
    ),
    ("ShareGPT with role and content", "conversations", {"conversations": [U, A]}, [U, A]),
    (
        "ShareGPT tools",
        "conversations",
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": '{"id": "c", "name": "f", "arguments": {}}'},
                {"from": "observation", "value": "T"},
            ]
        },
        [U, nested({}), {"role": "tool", "content": "T"}],
    ),
]


@pytest.mark.parametrize(("key", "record", "want"), [n[1:] for n in NORMALISED], ids=[n[0] for n in NORMALISED])
def test_conversations(key: str, record: dict[str, Any], want: list[dict[str, Any]]) -> None:
    messages, tools = conversation(record, key)
    assert messages == want and tools is None


def test_tools_as_list_or_text() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert conversation({"messages": [U, A], "tools": tools}, "messages")[1] == tools
    assert conversation({"messages": [U, A], "tools": json.dumps(tools)}, "messages")[1] == tools
    assert conversation({"messages": [U, A], "tools": []}, "messages")[1] is None


REJECTED: list[tuple[str, str, dict[str, Any]]] = [
    ("missing_key", "messages", {"id": "i"}),
    ("wrong_type", "messages", {"messages": "hello"}),
    ("wrong_type", "messages", {"messages": {"role": "user"}}),
    ("wrong_type", "messages", {"messages": None}),
    ("empty", "messages", {"messages": []}),
    ("wrong_type", "messages", {"messages": ["hello"]}),
    ("wrong_type", "messages", {"messages": [[U]]}),
    ("unknown_role", "messages", {"messages": [{"role": "wizard", "content": "Q"}, A]}),
    ("unknown_role", "messages", {"messages": [{"role": "human", "content": "Q"}, A]}),
    ("unknown_role", "messages", {"messages": [{"role": "User", "content": "Q"}, A]}),
    ("wrong_type", "messages", {"messages": [{"role": 1, "content": "Q"}, A]}),
    ("missing_key", "messages", {"messages": [{"content": "Q"}, A]}),
    ("missing_key", "messages", {"messages": [{"role": "user"}, A]}),
    ("missing_key", "messages", {"messages": [{"role": "user", "content": None}, A]}),
    ("missing_key", "messages", {"messages": [U, {"role": "assistant"}]}),
    ("missing_key", "messages", {"messages": [U, {"role": "assistant", "content": None, "tool_calls": []}]}),
    ("wrong_type", "messages", {"messages": [{"role": "user", "content": 7}, A]}),
    ("wrong_type", "messages", {"messages": [{"role": "user", "content": {"text": "Q"}}, A]}),
    ("unsupported_content", "messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]}),
    ("unsupported_content", "messages", {"messages": [{"role": "user", "content": ["Q"]}, A]}),
    ("wrong_type", "messages", {"messages": [U, A | {"reasoning_content": ["R"]}]}),
    ("wrong_type", "messages", {"messages": [U, {"role": "assistant", "content": "", "tool_calls": "f()"}]}),
    ("bad_tool_call", "messages", {"messages": [U, call()]}),
    ("bad_tool_call", "messages", {"messages": [U, call(name="")]}),
    ("bad_tool_call", "messages", {"messages": [U, call(name="f", arguments="{a: 1}")]}),
    ("bad_tool_call", "messages", {"messages": [U, call(name="f", arguments="[1]")]}),
    ("bad_tool_call", "messages", {"messages": [U, call(name="f", arguments=[1])]}),
    ("bad_tool_call", "messages", {"messages": [U, {"role": "assistant", "content": "", "tool_calls": [7]}]}),
    ("wrong_type", "messages", {"messages": [U, A], "tools": "[not json"}),
    ("wrong_type", "messages", {"messages": [U, A], "tools": {"name": "f"}}),
    ("wrong_type", "messages", {"messages": [U, A], "tools": ["f"]}),
    ("empty_mask", "messages", {"messages": [U]}),
    ("unknown_role", "conversations", {"conversations": [{"from": "narrator", "value": "Q"}]}),
    ("missing_key", "conversations", {"conversations": [{"value": "Q"}]}),
    ("missing_key", "conversations", {"conversations": [{"from": "human"}]}),
    ("bad_tool_call", "conversations", {"conversations": [{"from": "function_call", "value": "f()"}]}),
    ("bad_tool_call", "conversations", {"conversations": [{"from": "function_call"}]}),
    ("missing_key", "text", {"a": 1}),
    ("missing_key", "text", {"response": "R"}),
    ("wrong_type", "text", {"text": ["a"]}),
    ("wrong_type", "text", {"prompt": [U]}),
    ("wrong_type", "text", {"prompt": "a", "response": 7}),
    ("empty", "text", {"text": ""}),
    ("empty", "text", {"prompt": "", "response": ""}),
    ("empty_mask", "text", {"prompt": "a", "response": ""}),
    ("empty_mask", "text", {"prompt": "0123456789" * 10, "response": "cut off"}),
]

TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "a b"}, "<s>a b", "<s>a b"),
    ({"text": " \u2028\n"}, "<s> \u2028\n", "<s> \u2028\n"),
    ({"prompt": "a"}, "<s>a", "<s>a"),
    ({"prompt": "a", "response": " b"}, "<s>a b", " b"),
    ({"prompt": "a", "completion": " b"}, "<s>a b", " b"),
    ({"prompt": "", "response": "b"}, "<s>b", "b"),
    ({"prompt": "a", "response": None, "completion": "b"}, "<s>ab", "b"),
    ({"text": "t", "prompt": "a", "response": "b"}, "<s>t", "<s>t"),
]


def parse(format: str, record: dict[str, Any]) -> Any:
    encoder = ChatEncoder(byte_tokenizer("smollm2"))
    settings = TokenizeSettings(vocab_size=1000, max_seq_len=100)
    return encoder, SampleParser(format, settings, lambda: encoder).parse_line(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("code", "format", "record"), REJECTED, ids=[f"{r[0]} {json.dumps(r[2])[:60]}" for r in REJECTED]
)
def test_rejected(code: str, format: str, record: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as caught:
        parse(format, record | {"id": 7})
    assert caught.value.code == code and caught.value.sample_id == "7" and caught.value.message


@pytest.mark.parametrize(("record", "whole", "learned"), TEXTS)
def test_texts(record: dict[str, Any], whole: str, learned: str) -> None:
    encoder, tokens = parse("text", record)
    assert encoder.tokenizer.decode(tokens.input_ids) == whole
    assert encoder.tokenizer.decode(tokens.input_ids[tokens.loss_mask == 1]) == learned


def test_a_chat_sample_is_cut_with_its_mask() -> None:
    messages = [{"role": "system", "content": "S"}, U, {"role": "assistant", "content": "A" * 90}]
    encoder, tokens = parse("messages", {"messages": messages})
    assert tokens.truncated and len(tokens.input_ids) == len(tokens.loss_mask) == 100
    assert set(encoder.tokenizer.decode(tokens.input_ids[tokens.loss_mask == 1])) <= {"A"}


def test_a_token_that_the_model_does_not_know() -> None:
    """A tokenizer that does not belong to the model."""
    parser = SampleParser(
        "text", TokenizeSettings(vocab_size=50, max_seq_len=100), lambda: ChatEncoder(byte_tokenizer("smollm2"))
    )
    with pytest.raises(Rejected) as caught:
        parser.parse_line(b'{"text": "abc"}')
    assert caught.value.code == "token_out_of_range"
