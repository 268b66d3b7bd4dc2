"""One record -> one sample: token ids and loss mask, checked against the model and the limits."""

import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from hs_ray.config import ModelConfig
from hs_ray.inputs.chat import ChatEncoder
from hs_ray.inputs.messages import conversation
from hs_ray.inputs.records import Rejected, brief, json_type, need, parse_json, recognise, sample_id, wrong_key


@dataclass(frozen=True)
class TokenizeSettings:
    """What a reader needs to turn lines into samples. Plain values: it travels through Ray."""

    vocab_size: int
    max_seq_len: int
    truncate: bool = True  # False: longer samples are rejected
    id_key: str = "id"
    allow_empty_mask: bool = False
    limit: int | None = None  # lines of any one chunk that are needed at most
    model: ModelConfig = field(default_factory=ModelConfig)  # whose tokenizer
    template: str | None = None  # the text of model.chat_template: the file may not be on every node
    tokenizer_digest: str | None = None  # of the driver's copy, which a reader's must be like; None: whichever is there


@dataclass
class Tokens:
    """input_ids: int32 [S]; loss_mask: uint8 [S]."""

    sample_id: str | None
    input_ids: np.ndarray
    loss_mask: np.ndarray
    truncated: bool = False


class SampleParser:
    """Lines or records of one format -> Tokens, or Rejected. `encoder` is called when a tokenizer is first needed."""

    def __init__(self, format: str, settings: TokenizeSettings, encoder: Callable[[], ChatEncoder]):
        self.format = format
        self.settings = settings
        self._make_encoder = encoder
        # A key that occurs twice in a line, at any depth, is for the strict parser to judge.
        self._once = [f'"{key}"'.encode() for key in ("input_ids", "loss_mask", settings.id_key)]

    def parse_line(self, line: bytes) -> Tokens:
        fast = self._plain_tokens(line) if self.format == "tokens" else None
        return self._finish(fast) if fast is not None else self.parse_record(parse_json(line))

    def parse_record(self, record: dict[str, Any]) -> Tokens:
        """Raises Rejected, with the attribute `sample_id` where the record gave one."""
        identity = sample_id(record, self.settings.id_key)
        try:
            return self._finish(Tokens(identity, *self._encode(record)))
        except Rejected as error:
            error.sample_id = identity
            raise

    def _plain_tokens(self, line: bytes) -> Tokens | None:
        """The fast path of the `tokens` format, five times the strict one: a plainly good line, or None.

        Anything unusual (a float, `true`, a key that is there twice) is left to the strict parser, which also has the
        message.
        """
        if b"\\" in line or b"true" in line or b"false" in line or any(line.count(key) > 1 for key in self._once):
            return None
        try:
            record = orjson.loads(line)
            identity, given, mask = record.get(self.settings.id_key), record["input_ids"], record.get("loss_mask")
            if type(given) is not list or not (mask is None or type(mask) is list):
                return None
            ids = np.frombuffer(array.array("i", given), np.int32)  # refuses floats, text, null and what is too large
            loss_mask = np.ones(len(ids), np.uint8) if mask is None else np.frombuffer(bytes(mask), np.uint8)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return None
        if not (identity is None or type(identity) is int or (type(identity) is str and identity)):
            return None
        if not len(ids) or len(loss_mask) != len(ids) or loss_mask.max() > 1:
            return None
        return Tokens(None if identity is None else str(identity), ids, loss_mask)

    def _encode(self, record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        format = self.format if self.format != "auto" else recognise(record)
        if format is None:
            keys = ", ".join(sorted(map(str, record))[:8]) or "none"
            raise Rejected(
                "unknown_format",
                f"none of input_ids, messages, conversations, text, prompt; the keys of the line are: {keys}",
            )
        if format == "tokens":
            return _given_tokens(record)
        if format == "text":
            return self._make_encoder().encode_text(*_texts(record))
        messages, tools = conversation(record, format)
        return self._make_encoder().encode_chat(messages, tools)

    def _finish(self, tokens: Tokens) -> Tokens:
        """The checks that every format passes: vocabulary, length, something to learn."""
        ids, settings = tokens.input_ids, self.settings
        if not len(ids):
            raise Rejected("empty", "no tokens")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= settings.vocab_size:
            wrong = low if low < 0 else high
            message = f"token id {wrong}; the model knows 0 to {settings.vocab_size - 1}"
            raise Rejected("token_out_of_range", message, tokens.sample_id)
        if len(ids) > settings.max_seq_len:
            if not settings.truncate:
                raise Rejected(
                    "too_long", f"{len(ids)} tokens, max_seq_len is {settings.max_seq_len}", tokens.sample_id
                )
            tokens.input_ids, tokens.loss_mask = ids[: settings.max_seq_len], tokens.loss_mask[: settings.max_seq_len]
            tokens.truncated = True
        if not settings.allow_empty_mask and not tokens.loss_mask.any():
            cut = f" in its first {settings.max_seq_len} of {len(ids)} tokens" if tokens.truncated else ""
            raise Rejected("empty_mask", f"no token is learned{cut}", tokens.sample_id)
        return tokens


def _given_tokens(record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """`input_ids` with `loss_mask`, or all ones where there is none."""
    ids = _integers(record, "input_ids")
    if record.get("loss_mask") is None:
        return _int32(ids), np.ones(len(ids), np.uint8)
    mask = _integers(record, "loss_mask", booleans=True)
    if len(mask) != len(ids):
        raise Rejected("mask_length", f"loss_mask has {len(mask)} values, input_ids {len(ids)}")
    wrong = mask[(mask < 0) | (mask > 1)]
    if len(wrong):
        raise Rejected("mask_value", f"loss_mask holds {wrong[0]}, only 0 and 1 are allowed")
    return _int32(ids), mask.astype(np.uint8)


def _integers(record: dict[str, Any], key: str, booleans: bool = False) -> np.ndarray:
    """A list of whole numbers as int64. Parquet's come as arrays already."""
    value = record.get(key)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in ("iub" if booleans else "iu"):
            raise Rejected("wrong_type", f"{key} holds {value.dtype}, whole numbers are needed")
        return (
            np.clip(value, None, np.iinfo(np.int64).max).astype(np.int64)
            if value.dtype == np.uint64
            else value.astype(np.int64)
        )
    items = need(record, key, list, "an array of whole numbers")
    allowed = {int, bool} if booleans else {int}
    if not set(map(type, items)) <= allowed:
        wrong = next(item for item in items if type(item) not in allowed)
        raise Rejected("wrong_type", f"{key} holds {brief(wrong)} ({json_type(wrong)}), whole numbers are needed")
    try:
        return np.array(items, dtype=np.int64)
    except OverflowError:
        code = "mask_value" if key == "loss_mask" else "token_out_of_range"
        raise Rejected(code, f"{key} holds {brief(max(items, key=abs))}") from None


def _int32(ids: np.ndarray) -> np.ndarray:
    """Clipped to int32: what does not fit is out of every vocabulary, and still is after."""
    return np.clip(ids, -1, np.iinfo(np.int32).max).astype(np.int32)


def _texts(record: dict[str, Any]) -> tuple[str, str | None]:
    """(text, None), or (prompt, response)."""
    if "text" in record:
        first, second = need(record, "text", str, "text"), None
    elif "prompt" in record:
        first = need(record, "prompt", str, "text")
        key = next((key for key in ("response", "completion") if record.get(key) is not None), None)
        second = need(record, key, str, "text") if key else None
    else:
        wrong_key(record, "text or prompt")
    if not first + (second or ""):
        raise Rejected("empty", "the text is empty")
    return first, second
