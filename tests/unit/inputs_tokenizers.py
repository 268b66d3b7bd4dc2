"""Tokenizers made in memory: one token a byte, and the marks of the chat templates; a mask is then readable."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent / "inputs"
MARKS = {
    "smollm2": ["<|im_start|>", "<|im_end|>"],
    "generation": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    "kimi_k2": [
        "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ],
    "gpt_oss": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"],
}  # fmt: skip


def byte_tokenizer(name: str, trim_offsets: bool = False, merges: list[tuple[str, str]] | None = None) -> Any:
    """The tokenizer of tests/unit/inputs/<name>.jinja; `<s>` is added in front where special tokens are asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges or []
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, special=True) for mark in ["<s>", *MARKS[name]]])
    bos = "<|begin_of_text|>" if name == "llama3" else "<s>"
    template = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", [(bos, inner.token_to_id(bos))])
    inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), template])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = (HERE / f"{name}.jinja").read_text()
    return tokenizer


class Slow:
    """The same without offsets, as Kimi's own tokenizer is (Python, tiktoken)."""

    is_fast = False

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a slow tokenizer is used through encode() alone")
