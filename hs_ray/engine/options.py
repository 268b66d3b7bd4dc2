"""SGLang server arguments: ours, by device and release, and the user's (checked in `config_checks`)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hs_ray.schema import CaptureSpec

CPU_CHUNK, CUDA_CHUNK = 2048, 16384  # tokens of one forward pass
CPU_KV_TOKENS = 40_000
CONTEXT_SPARE = 8  # SGLang refuses a prompt that does not leave so much of the context for an answer


@dataclass(frozen=True)
class EngineOptions:
    """One engine, resolved: what the actor needs to start it."""

    spec: CaptureSpec
    architecture: str
    model_path: str
    release: str
    vocab_size: int
    context_length: int  # the model's own
    max_seq_len: int
    device: str  # cpu or cuda
    ring_bytes: int
    longest_tokens: int = 0  # of the plan's samples; 0: not known
    tp_size: int = 1
    dtype: str = "bfloat16"
    trust_remote_code: bool = False
    chunked_prefill_size: int | None = None
    mem_fraction_static: float | None = None
    attention_backend: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """Most tokens of one forward pass; -1: no chunks."""
        if self.chunked_prefill_size is not None:
            return self.chunked_prefill_size
        return CUDA_CHUNK if self.device == "cuda" else CPU_CHUNK


def set_environment() -> None:
    """What SGLang reads from the environment, in this process and those it starts; call before it is imported."""
    # A prompt of exactly the model's context is right, and SGLang wants a longer context for it.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # Its modules warn of kernels that are absent, and its processes draw bars, before their log level is set.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("TQDM_DISABLE", "1")


def server_args(options: EngineOptions) -> dict[str, Any]:
    """Keyword arguments of SGLang's engine."""
    chunk = options.chunk
    args: dict[str, Any] = {
        "model_path": options.model_path,
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code,
        "device": options.device,
        "tp_size": options.tp_size,
        "skip_tokenizer_init": True,
        "enable_multimodal": False,  # of a wrapper: no processor, no memory kept for pictures; prompts are token ids
        "disable_radix_cache": True,
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": max(chunk, CUDA_CHUNK),
        "disable_decode_cuda_graph": True,  # no decode step is run
        "sampling_backend": "pytorch",  # nothing is sampled: no kernels to compile for it
        "grammar_backend": "none",
        "log_level": "error",
        "watchdog_timeout": 3600,
        "sleep_on_idle": True,  # a scheduler that waits for the disk must not spin on a core
    }
    if options.max_seq_len + CONTEXT_SPARE > options.context_length:
        args["context_length"] = options.max_seq_len + CONTEXT_SPARE
    if options.attention_backend:
        args["attention_backend"] = options.attention_backend
    if options.mem_fraction_static:
        args["mem_fraction_static"] = options.mem_fraction_static
    if options.device == "cpu":
        args.setdefault("attention_backend", "torch_native")
        args.setdefault("mem_fraction_static", 0.5)  # the pool is bounded by max_total_tokens
        args["max_total_tokens"] = max(CPU_KV_TOKENS, options.max_seq_len + 2 * max(chunk, CPU_CHUNK))
    else:
        args["disable_prefill_cuda_graph"] = True  # measured: no gain at full batches, half a minute at each start
    if options.release == "0.5.17":
        # Fused all-reduce leaves partial sums in the states of five model files (patches/README.md).
        args["enforce_disable_flashinfer_allreduce_fusion"] = True
    return {**args, **options.args}
