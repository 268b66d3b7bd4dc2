"""A record's conversation, in OpenAI's or ShareGPT's spelling -> the one shape that chat templates take.

Out comes a list of {role, content} with, where given, `tool_calls` (nested, arguments as an object), `tool_call_id`,
`name`, and an assistant's reasoning under every name that templates look for it.
"""

import json
from typing import Any

from hs_ray.inputs.records import Rejected, brief, json_type, need, parse_json

OPENAI_ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")} | {"function": "tool"}
SHAREGPT_ROLES = OPENAI_ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
# Qwen3, Kimi and DeepSeek templates read the first, GPT-OSS's the second; the third is what vLLM and OpenRouter return.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


def conversation(record: dict[str, Any], key: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """(messages, tools or None) of `record[key]`, where key is `messages` or `conversations`. Raises Rejected."""
    raw = need(record, key, list, "an array of messages")
    if not raw:
        raise Rejected("empty", f"{key} is an empty array")
    roles = OPENAI_ROLES if key == "messages" else SHAREGPT_ROLES
    messages = [_message(turn, f"{key}[{i}]", roles) for i, turn in enumerate(raw)]
    system = record.get("system")  # ShareGPT's sets keep it beside the turns
    if key == "conversations" and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages, _tools(record)


def _message(turn: Any, where: str, roles: dict[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise Rejected("wrong_type", f"{where} is {brief(turn)} ({json_type(turn)}), an object is needed")
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    name = need(turn, role_key, str, "the name of a role") if role_key in turn else None
    if name is None:
        raise Rejected("missing_key", f"{where} has no role")
    if name not in roles:
        raise Rejected("unknown_role", f"{where} has the role {brief(name)}; known: {', '.join(roles)}")
    message: Message = {"role": roles[name], "content": _content(turn.get(content_key), f"{where}.{content_key}")}
    if message["role"] == "assistant":
        if name == "function_call":
            message |= {"content": None, "tool_calls": [_tool_call(message["content"], where)]}
        else:
            message |= _assistant_extras(turn, where)
    elif message["content"] is None:
        raise Rejected("missing_key", f"{where} has no {content_key}")
    return message | {key: turn[key] for key in ("tool_call_id", "name") if isinstance(turn.get(key), str)}


def _content(value: Any, where: str) -> str | None:
    """Text, or the texts of content parts joined: few templates take parts. None stays None: templates look for it."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Rejected("wrong_type", f"{where} is {brief(value)} ({json_type(value)}), text is needed")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else json_type(part)
            raise Rejected(
                "unsupported_content", f"{where} has a part of type {brief(kind)}; only text can be captured"
            )
        texts.append(part["text"])
    return "".join(texts)


def _assistant_extras(turn: Message, where: str) -> Message:
    """Tool calls and reasoning, and the check that there is anything at all to say."""
    calls = turn.get("tool_calls")
    if calls is None and turn.get("function_call") is not None:
        calls = [turn["function_call"]]
    extras: Message = {}
    if calls:
        if not isinstance(calls, list):
            raise Rejected(
                "wrong_type", f"{where}.tool_calls is {brief(calls)} ({json_type(calls)}), an array is needed"
            )
        extras["tool_calls"] = [_tool_call(call, where) for call in calls]
    reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key)), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise Rejected(
                "wrong_type", f"{where}: reasoning is {brief(reasoning)} ({json_type(reasoning)}), text is needed"
            )
        extras |= dict.fromkeys(REASONING_KEYS, reasoning)
    if not extras and turn.get("content", turn.get("value")) is None:
        raise Rejected("missing_key", f"{where} has no content, reasoning or tool calls")
    return extras


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """{id, type, function: {name, arguments}}. Arguments given as JSON text become an object, as in a chat server."""
    if isinstance(call, str):
        call = _parse(call, where)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Rejected("bad_tool_call", f"{where}: a tool call without a function name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parse(arguments, where) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Rejected("bad_tool_call", f"{where}: the arguments of {function['name']} are not an object")
    extra = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return extra | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_json(text.encode())
    except Rejected as error:
        raise Rejected(
            "bad_tool_call", f"{where}: the arguments of a tool call are not a JSON object ({error})"
        ) from None


def _tools(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the conversation could use; some data sets keep them as JSON text."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise Rejected("wrong_type", f"tools is text that is not JSON ({error})") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("wrong_type", f"tools is {brief(tools)} ({json_type(tools)}), an array of objects is needed")
    return tools
