"""One line of JSON -> one record, or the reason why not."""

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import orjson

# Every code that a line can be rejected with: what `_rejects/`, the estimate and `describe` count by.
REJECT_CODES = {
    "invalid_utf8": "the line is not UTF-8",
    "malformed_json": "the line is not one JSON value, or not a legal one (NaN, a repeated key, nested too deeply)",
    "lone_surrogate": "a string holds half of a UTF-16 pair, which no tokenizer and no file can hold",
    "line_too_long": "the line is longer than is read",
    "not_an_object": "the line is JSON, but not an object",
    "bad_id": "the id is neither a string nor a whole number, or it is empty",
    "duplicate_id": "an earlier line has this id",
    "unknown_format": "no key of the line says what it holds",
    "missing_key": "the line lacks a key that its format needs",
    "wrong_type": "a value has the wrong type",
    "empty": "no tokens, no messages, or no text",
    "token_out_of_range": "a token id is negative or not in the model's vocabulary",
    "mask_length": "loss_mask and input_ids differ in length",
    "mask_value": "loss_mask holds something else than 0 and 1",
    "empty_mask": "no token of the sample is learned (input.allow_empty_mask=true keeps it)",
    "too_long": "more than max_seq_len tokens (with on_too_long=reject)",
    "unknown_role": "a message has a role that is not known",
    "unsupported_content": "a message holds something else than text",
    "bad_tool_call": "a tool call has no name, or its arguments are not JSON",
    "template_error": "the chat template failed on these messages",
    "mask_unverified": "the chat template renders this conversation so that the assistant's turns cannot be told",
    "tool_call_dropped": "the chat template leaves out a tool call of the sample",
}


class Rejected(Exception):
    """A line that becomes no sample. Caught where lines are read; never leaves this package."""

    def __init__(self, code: str, message: str, sample_id: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.sample_id = sample_id  # where the line gave one before it failed


def _strict_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} occurs twice in one object")
    return result


_exact = json.JSONDecoder(object_pairs_hook=_strict_object)


def parse_json(line: bytes) -> dict[str, Any]:
    """The object that a line holds, exactly. Raises Rejected.

    Two parsers must agree, because neither will do alone: orjson refuses what is not JSON (NaN, 1e999, lone surrogates,
    bad UTF-8) but turns integers of over 64 bits into floats and lets the last of two equal keys win; json is exact but
    lax.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected("invalid_utf8", f"byte {error.start} of the line: {error.reason}") from None
    try:
        orjson.loads(line)
        value = _exact.decode(text)
    except orjson.JSONDecodeError as error:
        code = "lone_surrogate" if "surrogate" in str(error) else "malformed_json"
        raise Rejected(code, str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Rejected("malformed_json", str(error) or type(error).__name__) from None
    if not isinstance(value, dict):
        raise Rejected("not_an_object", f"the line is a JSON {json_type(value)}, an object is needed")
    return value


FORMAT_KEYS = {
    "input_ids": "tokens",
    "messages": "messages",
    "conversations": "conversations",
    "text": "text",
    "prompt": "text",
}


def recognise(keys: Iterable[str]) -> str | None:
    """The format that a record's keys speak for; of several the one nearest to tokens."""
    present = set(keys)
    return next((name for key, name in FORMAT_KEYS.items() if key in present), None)


def sample_id(record: dict[str, Any], id_key: str) -> str | None:
    """The id that a record gives, as text; None where it gives none. Raises Rejected."""
    value = record.get(id_key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value:
        return value
    raise Rejected("bad_id", f"{id_key} is {brief(value)} ({json_type(value)}), a string or a whole number is needed")


def need(record: dict[str, Any], key: str, type_: type, what: str) -> Any:
    """`record[key]` of this type. Raises Rejected."""
    if key not in record:
        wrong_key(record, key)
    value = record[key]
    if not isinstance(value, type_):
        raise Rejected("wrong_type", f"{key} is {brief(value)} ({json_type(value)}), {what} is needed")
    return value


def wrong_key(record: dict[str, Any], key: str) -> NoReturn:
    present = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise Rejected("missing_key", f"no {key}; the keys of the line are: {present}")


def json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def brief(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value) if not isinstance(value, list | dict) else f"{json_type(value)} of {len(value)}"
    return text if len(text) <= 60 else text[:57] + "..."
