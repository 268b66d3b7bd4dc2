"""A conversation -> token ids and loss mask, with the model's own tokenizer and chat template.

What is learned: an assistant's reasoning, content, tool calls and end-of-turn token. Not its header, which the
serving engine writes (the generation prompt), nor the newline after the turn.

Where the template has {% generation %} markers, they say it. Where not, the turns are found by rendering shorter
conversations and checking that each rendering is a prefix of the whole; a conversation for which that fails is
rejected, not guessed at. The text itself is never searched for headers: it may contain anything, the marks of the
template among it.
"""

import os
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

from hs_ray.errors import InputError
from hs_ray.inputs.messages import REASONING_KEYS, Message
from hs_ray.inputs.records import Rejected

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # in a template; the same test that transformers makes
PROBE = "\ue000"  # private use: no template begins a turn with it
FOLLOWER: Message = {"role": "user", "content": "?"}
Span = tuple[int, int]
Tools = list[dict[str, Any]] | None


class ChatEncoder:
    """One tokenizer with its template, ready to encode. Not shared between threads."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # Named special tokens alone will not do: Llama 3's <|eom_id|> and GPT-OSS's <|end|> have no name.
        self.marks = tuple(
            {str(t.content) for t in added if t.special} | {str(t) for t in tokenizer.all_special_tokens}
        )

    def encode_chat(self, messages: list[Message], tools: Tools) -> tuple[np.ndarray, np.ndarray]:
        """-> input_ids int32 [S], loss_mask uint8 [S]. Raises Rejected."""
        template = self._template(tools)
        if GENERATION.search(template):
            text, spans = self._marked_spans(template, messages, tools)
        else:
            text = self._render(messages, tools)
            spans = self._verified_spans(text, messages, tools)
        _check_tool_calls(messages, "".join(text[first:last] for first, last in spans))
        return self.encode_spans(text, spans, special=False)

    def encode_text(self, prompt: str, response: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Raw text, with the BOS that the model expects. All of it is learned, or only the response if there is one."""
        text, start = (prompt, 0) if response is None else (prompt + response, len(prompt))
        bos = self.tokenizer.bos_token
        special = not (bos and text.startswith(bos))  # a text rendered before has its BOS: not a second one
        ids, mask = self.encode_spans(text, [(start, len(text))], special)
        return ids, np.ones_like(mask) if response is None else mask

    def encode_spans(self, text: str, spans: list[Span], special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the whole text; mask 1 on tokens that lie inside a span (in characters of the text)."""
        if not getattr(self.tokenizer, "is_fast", False):
            return self._encode_pieces(text, spans, special)
        encoded = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        begin, end = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.uint8)
        for first, last in spans:
            # `end > first`: some tokenizers trim blanks off offsets, so that a blank before the span becomes an empty
            # range at `first`.
            mask[(begin >= first) & (end > first) & (end <= last)] = 1
        return ids, mask

    def _encode_pieces(self, text: str, spans: list[Span], special: bool) -> tuple[np.ndarray, np.ndarray]:
        """For tokenizers without offsets: encode between the borders; accepted if that gives the ids of the whole."""
        whole = self.tokenizer.encode(text, add_special_tokens=True) if special else self._encode_plain(text)
        borders = [0, *(border for span in spans for border in span), len(text)]
        ids: list[int] = []
        mask: list[int] = []
        for i, (first, last) in enumerate(pairwise(borders)):
            piece = self._encode_plain(text[first:last]) if last > first else []
            ids += piece
            mask += [i % 2] * len(piece)
        lead = len(whole) - len(ids)  # a BOS, with special tokens
        if whole[lead:] != ids or lead > (1 if special else 0):
            raise Rejected(
                "mask_unverified", "the tokens of the assistant's turns differ from those inside the whole conversation"
            )
        return np.array(whole, dtype=np.int32), np.array([0] * lead + mask, dtype=np.uint8)

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _template(self, tools: Tools) -> str:
        try:
            return str(self.tokenizer.get_chat_template(None, tools))
        except ValueError as error:
            raise InputError(
                f"model.chat_template = null: the tokenizer has no chat template, and the input has conversations; "
                f"give a file with one ({error})"
            ) from error

    def _render(self, messages: list[Message], tools: Tools, prompt: bool = False) -> str:
        """`prompt`: with the generation prompt, the header of the assistant's next turn."""
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template is a program of someone else's: it may raise anything
            raise Rejected("template_error", f"{type(error).__name__}: {error}") from error
        return str(rendered)

    def _marked_spans(self, template: str, messages: list[Message], tools: Tools) -> tuple[str, list[Span]]:
        """What `apply_chat_template(return_assistant_tokens_mask=True)` goes by; that one needs a fast tokenizer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise Rejected("template_error", f"{type(error).__name__}: {error}") from error
        return texts[0], list(spans[0])

    def _verified_spans(self, text: str, messages: list[Message], tools: Tools) -> list[Span]:
        messages = self._without_dropped_reasoning(text, messages, tools)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._turn_start(text, messages[:i], tools)
                end = self._turn_end(text, messages, i, tools) if start is not None else None
                if start is None or end is None or end < start:
                    raise Rejected(
                        "mask_unverified",
                        f"the {'start' if start is None else 'end'} of message {i} cannot be told: the chat template "
                        f"renders the first messages otherwise when more follow; give a model.chat_template with "
                        f"{{% generation %}} markers",
                    )
                spans.append((start, self._trim(text, start, end)))
        return spans

    def _without_dropped_reasoning(self, text: str, messages: list[Message], tools: Tools) -> list[Message]:
        """Without the reasoning of earlier turns that the template leaves out anyway (Qwen3, Kimi, GPT-OSS).

        It would be in when a shorter conversation ends near that turn, which then is no prefix of the whole.
        """
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        for i, message in enumerate(messages[:last]):
            if REASONING_KEYS[0] in message:
                bare = {key: value for key, value in message.items() if key not in REASONING_KEYS}
                slim = [*messages[:i], bare, *messages[i + 1 :]]
                if self._render(slim, tools) == text:
                    messages = slim
        return messages

    def _turn_start(self, text: str, before: list[Message], tools: Tools) -> int | None:
        """Where the turn after `before` begins: behind the generation prompt.

        Of a prompt that also opens the reasoning (`<think>`), a turn without any has only the header. A turn that
        begins with a character like no other tells where the header ends.
        """
        try:
            prompt = self._render(before, tools, prompt=True)
            if text.startswith(prompt):
                return len(prompt)
            base = self._render(before, tools)
            probe = self._render([*before, {"role": "assistant", "content": PROBE}, FOLLOWER], tools)
        except Rejected:
            return None
        header = os.path.commonprefix([prompt, probe])
        return len(header) if text.startswith(base) and text.startswith(header) and len(header) > len(base) else None

    def _turn_end(self, text: str, messages: list[Message], i: int, tools: Tools) -> int | None:
        """Where turn `i` ends: after the conversation up to it, rendered alone.

        Some templates render a turn in another way when it is the last one (Qwen3 adds an empty thinking block, GPT-OSS
        ends it with <|return|>). Then a question follows it, once and twice: what the second adds is the length of one.
        """
        if i == len(messages) - 1:
            return len(text)
        try:
            alone = self._render(messages[: i + 1], tools)
            if text.startswith(alone):
                return len(alone)
            once = self._render([*messages[: i + 1], FOLLOWER], tools)
            twice = self._render([*messages[: i + 1], FOLLOWER, FOLLOWER], tools)
        except Rejected:
            return None
        question = twice[len(once) :]
        turn = once[: len(once) - len(question)]
        same = bool(question) and twice.startswith(once) and once.endswith(question) and text.startswith(turn)
        return len(turn) if same and turn.rstrip().endswith(self.marks) else None

    def _trim(self, text: str, start: int, end: int) -> int:
        """Without the newline that a template writes behind the end-of-turn token."""
        bare = text[start:end].rstrip()
        return start + len(bare) if bare.endswith(self.marks) else end


def _check_tool_calls(messages: list[Message], learned: str) -> None:
    """A template that knows nothing of tools renders a turn of tool calls as an empty one."""
    names = Counter(call["function"]["name"] for message in messages for call in message.get("tool_calls", ()))
    for name, calls in names.items():
        if learned.count(name) < calls:
            raise Rejected("tool_call_dropped", f"the rendered turns of the assistant lack a call of {name}")
