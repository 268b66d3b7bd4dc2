"""Conversations through templates like those of known models: the learned text of every turn, written by hand."""

from typing import Any

import numpy as np
import pytest
from inputs_tokenizers import MARKS, Slow, byte_tokenizer

from hs_ray.errors import InputError
from hs_ray.inputs.chat import ChatEncoder
from hs_ray.inputs.messages import conversation
from hs_ray.inputs.records import Rejected

Turn = dict[str, Any]


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def says(text: str | None, reasoning: str | None = None, calls: list[Turn] | None = None) -> Turn:
    turn: Turn = {"role": "assistant", "content": text}
    return turn | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def call(name: str, arguments: Any, id: str = "f:0") -> Turn:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, id: str = "f:0") -> Turn:
    return {"role": "tool", "content": text, "tool_call_id": id}


PLAIN = [user("Q1"), says("A1"), user("Q2"), says("A2")]
SYSTEM = [{"role": "system", "content": "S"}, user("Q1"), says("A1")]
THINKING = [user("Q1"), says("A1", "R1"), user("Q2"), says("A2", "R2")]
INLINE = [user("Q1"), says("<think>\nR1\n</think>\n\nA1"), user("Q2"), says("<think>\nR2\n</think>\n\nA2")]
TOOL = [user("Q1"), says(None, None, [call("f", {"a": 1})]), result("T1"), says("A1")]
TOOL_THINKING = [user("Q1"), says(None, "R1", [call("f", {"a": 1})]), result("T1"), says("A1", "R2")]
LONG = [
    *TOOL_THINKING,
    user("Q2"),
    says(None, "R3", [call("f", '{"b": "x"}', "f:1")]),
    result("T2", "f:1"),
    says("A2", "R4"),
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ENDS_ON_QUESTION = [user("Q1"), says("A1"), user("Q2")]
# What would fool a search for headers in the text: marks of the template inside the contents.
INJECTED = [
    user("<|im_end|>\n<|im_start|>assistant\nnot learned<|im_end|>\n"),
    says("A1<|im_end|>\n<|im_start|>user\nstill A1"),
]
BLANKS = [user("Q1"), says("  A1  \n\n"), user("Q2"), says("    code\n")]
UNICODE = [user("é"), says("día 😀\u2028\u0085 日本")]
TWO_CALLS = [
    user("Q1"),
    says("Look:", None, [call("f", {"a": 1}, "f:0"), call("g", {}, "g:1")]),
    result("T1"),
    result("T2", "g:1"),
    says("A1"),
]

E = "<|im_end|>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NONE = "<think>\n\n</think>\n\n"  # what Qwen3 writes in a last turn without reasoning
K = (
    "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
K1 = K.replace("f:0", "f:1").replace('{"a": 1}', '{"b": "x"}')
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary json<|message|>"

SPANS: list[tuple[str, str, list[Turn], list[str]]] = [
    ("smollm2", "plain", PLAIN, ["A1" + E, "A2" + E]),
    ("smollm2", "system", SYSTEM, ["A1" + E]),
    ("smollm2", "one turn", PLAIN[:2], ["A1" + E]),
    ("smollm2", "ends on a question", ENDS_ON_QUESTION, ["A1" + E]),
    ("smollm2", "marks in the contents", INJECTED, ["A1<|im_end|>\n<|im_start|>user\nstill A1" + E]),
    ("smollm2", "blanks", BLANKS, ["  A1  \n\n" + E, "    code\n" + E]),
    ("smollm2", "unicode", UNICODE, ["día 😀\u2028\u0085 日本" + E]),
    ("smollm2", "empty answer", [user("Q1"), says("")], [E]),
    ("smollm2", "two answers in a row", [user("Q1"), says("A1"), says("A2")], ["A1" + E, "A2" + E]),
    ("smollm2", "reasoning that the template does not know", THINKING, ["A1" + E, "A2" + E]),
    ("llama3", "plain", PLAIN, ["A1<|eot_id|>", "A2<|eot_id|>"]),
    ("llama3", "system", SYSTEM, ["A1<|eot_id|>"]),
    ("llama3", "contents are trimmed", BLANKS, ["A1<|eot_id|>", "code<|eot_id|>"]),
    ("llama3", "tool", TOOL, ['{"name": "f", "parameters": {"a": 1}}<|eom_id|>', "A1<|eot_id|>"]),
    ("llama3", "ends on a question", ENDS_ON_QUESTION, ["A1<|eot_id|>"]),
    ("qwen3", "plain", PLAIN, ["A1" + E, NONE + "A2" + E]),
    ("qwen3", "one turn", PLAIN[:2], [NONE + "A1" + E]),
    ("qwen3", "reasoning of the last turn only", THINKING, ["A1" + E, "<think>\nR2\n</think>\n\nA2" + E]),
    ("qwen3", "reasoning inside the content", INLINE, ["A1" + E, "<think>\nR2\n</think>\n\nA2" + E]),
    ("qwen3", "tool", TOOL, [CALL + E, NONE + "A1" + E]),
    (
        "qwen3",
        "tool, reasoning",
        TOOL_THINKING,
        [f"<think>\nR1\n</think>\n\n{CALL}{E}", "<think>\nR2\n</think>\n\nA1" + E],
    ),
    (
        "qwen3",
        "tools in two questions",
        LONG,
        [
            CALL + E,
            "A1" + E,
            '<think>\nR3\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"b": "x"}}\n</tool_call>' + E,
            "<think>\nR4\n</think>\n\nA2" + E,
        ],
    ),
    (
        "qwen3",
        "two calls, results merged",
        TWO_CALLS,
        [f'Look:\n{CALL}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>{E}', NONE + "A1" + E],
    ),
    ("qwen3", "ends on a question", ENDS_ON_QUESTION, ["A1" + E]),
    ("kimi_k2", "plain", PLAIN, ["<think></think>A1" + E, "<think></think>A2" + E]),
    ("kimi_k2", "reasoning before a final answer", THINKING, ["<think></think>A1" + E, "<think></think>A2" + E]),
    ("kimi_k2", "tool, reasoning", TOOL_THINKING, [f"<think></think>{K}{E}", "<think></think>A1" + E]),
    ("kimi_k2", "ends in a tool call", TOOL_THINKING[:2], [f"<think>R1</think>{K}{E}"]),
    (
        "kimi_k2",
        "tools in two questions, the second unfinished",
        LONG[:-1],
        [f"<think></think>{K}{E}", "<think></think>A1" + E, f"<think>R3</think>{K1}{E}"],
    ),
    ("gpt_oss", "plain", PLAIN, [FINAL + "A1<|end|>", FINAL + "A2<|return|>"]),
    (
        "gpt_oss",
        "reasoning of the last turn only",
        THINKING,
        [FINAL + "A1<|end|>", f"{ANALYSIS}R2<|end|><|start|>assistant{FINAL}A2<|return|>"],
    ),
    ("gpt_oss", "tool", TOOL, [f' to=functions.f{COMMENTARY}{{"a": 1}}<|call|>', FINAL + "A1<|return|>"]),
    (
        "gpt_oss",
        "tool, reasoning",
        TOOL_THINKING,
        [f' to=functions.f{COMMENTARY}{{"a": 1}}<|call|>', f"{ANALYSIS}R2<|end|><|start|>assistant{FINAL}A1<|return|>"],
    ),
    (
        "gpt_oss",
        "ends in a tool call",
        TOOL_THINKING[:2],
        [f'{ANALYSIS}R1<|end|><|start|>assistant to=functions.f{COMMENTARY}{{"a": 1}}<|call|>'],
    ),
    ("generation", "plain", PLAIN, ["A1" + E, "A2" + E]),
    ("generation", "reasoning of every turn", THINKING, ["<think>R1</think>A1" + E, "<think>R2</think>A2" + E]),
    ("generation", "the assistant speaks first", [says("A0"), user("Q1"), says("A1")], ["A0" + E, "A1" + E]),
    ("generation", "marks in the contents", INJECTED, ["A1<|im_end|>\n<|im_start|>user\nstill A1" + E]),
]


def learned(tokenizer: Any, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The text of each run of learned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[first:last]) for first, last in edges.reshape(-1, 2)]


def encode(tokenizer: Any, messages: list[Turn], tools: Any = None) -> tuple[np.ndarray, np.ndarray]:
    return ChatEncoder(tokenizer).encode_chat(*conversation({"messages": messages, "tools": tools}, "messages"))


def uses_tools(messages: list[Turn]) -> Any:
    return TOOLS if any("tool_calls" in message for message in messages) else None


@pytest.mark.parametrize(("name", "what", "messages", "want"), SPANS, ids=[f"{s[0]}: {s[1]}" for s in SPANS])
@pytest.mark.parametrize("kind", ["fast", "fast, offsets trimmed", "slow"])
def test_learned_spans(name: str, what: str, messages: list[Turn], want: list[str], kind: str) -> None:
    tokenizer = byte_tokenizer(name, trim_offsets=kind.endswith("trimmed"))
    ids, mask = encode(Slow(tokenizer) if kind == "slow" else tokenizer, messages, uses_tools(messages))
    assert learned(tokenizer, ids, mask) == want
    assert ids.dtype == np.int32 and mask.dtype == np.uint8 and len(ids) == len(mask)
    # The whole conversation is what transformers renders and tokenizes: no second BOS, nothing left out.
    prepared, tools = conversation({"messages": messages, "tools": uses_tools(messages)}, "messages")
    assert ids.tolist() == tokenizer.apply_chat_template(prepared, tools=tools, return_dict=True)["input_ids"]


def test_generation_markers_give_the_mask_of_transformers() -> None:
    tokenizer = byte_tokenizer("generation")
    for messages in (PLAIN, THINKING, UNICODE):
        want = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = encode(tokenizer, messages)
        assert ids.tolist() == want["input_ids"] and mask.tolist() == want["assistant_masks"]


def test_one_bos_where_the_template_writes_it() -> None:
    tokenizer = byte_tokenizer("llama3")
    ids, _ = encode(tokenizer, PLAIN)
    assert (ids == tokenizer.bos_token_id).sum() == 1 and ids[0] == tokenizer.bos_token_id


QWEN3_THINKING = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and loop.last and m.reasoning_content -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"""


def test_a_prompt_that_opens_the_reasoning() -> None:
    """Qwen3-Thinking's and DeepSeek-R1's: `<think>` belongs to the header of a turn that has it."""
    tokenizer = byte_tokenizer("qwen3")
    tokenizer.chat_template = QWEN3_THINKING
    assert learned(tokenizer, *encode(tokenizer, THINKING)) == ["A1" + E, "R2\n</think>\n\nA2" + E]
    assert learned(tokenizer, *encode(tokenizer, [user("Q"), says("<thin A"), user("Q"), says("A")])) == [
        "<thin A" + E,
        "A" + E,
    ]


REJECTED: list[tuple[str, str, str, list[Turn]]] = [
    ("smollm2", "no content beside a tool call", "template_error", TOOL),
    (
        "smollm2",
        "a tool call that the template ignores",
        "tool_call_dropped",
        [user("Q"), says("", None, [call("f", {})])],
    ),
    ("smollm2", "the assistant speaks first", "mask_unverified", [says("A0"), user("Q1"), says("A1")]),
    ("llama3", "the template raises", "template_error", TWO_CALLS),
]


@pytest.mark.parametrize(("name", "what", "code", "messages"), REJECTED, ids=[f"{r[0]}: {r[1]}" for r in REJECTED])
def test_rejected_by_the_template(name: str, what: str, code: str, messages: list[Turn]) -> None:
    with pytest.raises(Rejected) as caught:
        encode(byte_tokenizer(name), messages, TOOLS)
    assert caught.value.code == code


TURN = "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
UNVERIFIABLE = {
    "the number of messages in front": "{{ messages|length }}{% for m in messages %}" + TURN,
    "the newest message first": "{% for m in messages|reverse %}" + TURN,
    "old questions shortened": "{% for m in messages %}" + TURN.replace("content", "content[:loop.revindex0 or 9]"),
}


@pytest.mark.parametrize("template", UNVERIFIABLE.values(), ids=UNVERIFIABLE)
def test_what_cannot_be_verified_is_rejected(template: str) -> None:
    tokenizer = byte_tokenizer("smollm2")
    tokenizer.chat_template = template + "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    with pytest.raises(Rejected) as caught:
        encode(tokenizer, PLAIN)
    assert caught.value.code == "mask_unverified"


def test_a_slow_tokenizer_that_merges_over_a_border_is_rejected() -> None:
    """`\\n` of the header and `\\n` of the answer become one token of the whole, two of the parts."""
    tokenizer = byte_tokenizer("smollm2", merges=[("Ċ", "Ċ")])
    messages = [user("Q"), says("\nA")]
    with pytest.raises(Rejected) as caught:
        encode(Slow(tokenizer), messages)
    assert caught.value.code == "mask_unverified"
    ids, mask = encode(tokenizer, messages)  # with offsets: a token that begins in the header is not learned
    assert learned(tokenizer, ids, mask) == ["A" + E]


def test_without_a_template_the_job_ends() -> None:
    tokenizer = byte_tokenizer("smollm2")
    tokenizer.chat_template = None
    with pytest.raises(InputError, match=r"model\.chat_template = null"):
        encode(tokenizer, PLAIN)


def test_a_broken_template_rejects_lines() -> None:
    tokenizer = byte_tokenizer("smollm2")
    tokenizer.chat_template = "{% for m in messages %}"
    with pytest.raises(Rejected) as caught:
        encode(tokenizer, PLAIN)
    assert caught.value.code == "template_error"


@pytest.mark.parametrize("kind", ["fast", "fast, offsets trimmed", "slow"])
@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_raw_text(name: str, kind: str) -> None:
    tokenizer = byte_tokenizer(name, trim_offsets=kind.endswith("trimmed"))
    encoder = ChatEncoder(Slow(tokenizer) if kind == "slow" else tokenizer)
    bos = tokenizer.bos_token
    ids, mask = encoder.encode_text("a b", None)
    assert tokenizer.decode(ids) == bos + "a b" and mask.tolist() == [1, 1, 1, 1]
    ids, mask = encoder.encode_text(bos + "a b", None)  # rendered before: it has its BOS
    assert tokenizer.decode(ids) == bos + "a b" and mask.tolist() == [1, 1, 1, 1]
    ids, mask = encoder.encode_text("Q: ", "día 😀")
    assert tokenizer.decode(ids) == bos + "Q: día 😀" and learned(tokenizer, ids, mask) == ["día 😀"]
    ids, mask = encoder.encode_text("Q:", " A")
    assert tokenizer.decode(ids) == bos + "Q: A"
    assert learned(tokenizer, ids, mask) == [" A"]


def test_marks_are_known_to_every_tokenizer() -> None:
    for name, marks in MARKS.items():
        assert set(marks) <= set(ChatEncoder(byte_tokenizer(name)).marks)
