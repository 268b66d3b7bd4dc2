"""SGLang server arguments: ours, by device and release, and the user's, checked before any GPU is taken."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hs_ray.schema import CaptureSpec

CPU_CHUNK, CUDA_CHUNK = 2048, 16384  # tokens of one forward pass
CPU_KV_TOKENS = 40_000

# Arguments that decide whether states are right or that another key already sets; refused in engine.args.
OWNED = {
    "model_path": "set model.path",
    "tokenizer_path": "the engine gets token ids; set model.tokenizer",
    "revision": "set model.revision",
    "dtype": "set model.dtype",
    "trust_remote_code": "set model.trust_remote_code",
    "device": "set engine.device",
    "tp_size": "set engine.tp_size",
    "chunked_prefill_size": "set engine.chunked_prefill_size",
    "max_prefill_tokens": "follows engine.chunked_prefill_size",
    "mem_fraction_static": "set engine.mem_fraction_static",
    "attention_backend": "set engine.attention_backend",
    "context_length": "set max_seq_len",
    "skip_tokenizer_init": "the engine gets token ids and returns no text",
    "allow_auto_truncate": "samples would be cut in silence; max_seq_len and on_too_long decide",
    "disable_radix_cache": "with the prefix cache on, cached tokens are not computed and have no states",
    "enable_mixed_chunk": "decode rows would be mixed into prefill batches",
    "enable_return_hidden_states": "SGLang's own way loses chunks; hs_ray captures beside it",
    "enable_return_aux_hidden_states": "SGLang's own way loses chunks; hs_ray captures beside it",
    "disable_decode_cuda_graph": "no decode step is ever run",
    "pp_size": "with pipeline parallelism earlier stages' layers never reach the capture",
    "enable_two_batch_overlap": "it goes around the loop that captures",
    "enable_single_batch_overlap": "it goes around the loop that captures",
    "enable_pdmux": "split prefill goes around the capture",
    "speculative_algorithm": "a draft model shares the target's forward passes",
    "speculative_draft_model_path": "a draft model shares the target's forward passes",
    "disaggregation_mode": "prefill and decode on different engines is not captured",
    "attn_cp_size": "context parallelism splits a sample's rows over ranks",
    "enable_prefill_cp": "context parallelism splits a sample's rows over ranks",
    "enable_layernorm_sp": "rows are split over ranks where they are captured",
    "dp_size": "set engine.replicas: independent engines are faster for batch work",
    "enable_dp_attention": "each rank holds other requests' rows; not captured yet",
    "attn_dp_size": "each rank holds other requests' rows; not captured yet",
    "nnodes": "an engine larger than a node is not supported: use a smaller tp_size, or quantised weights",
    "node_rank": "an engine larger than a node is not supported",
    "dist_init_addr": "an engine larger than a node is not supported",
    "enable_hierarchical_cache": "tokens loaded from a cache are not computed and have no states",
    "enable_lmcache": "tokens loaded from a cache are not computed and have no states",
    "enable_lora": "adapters change the states without changing the model's fingerprint",
    "lora_paths": "adapters change the states without changing the model's fingerprint",
    "use_ray": "the engine runs below hs_ray's own actor",
    "forward_hooks": "other hooks on the same modules could change what is captured",
}


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


def check_args(args: Mapping[str, Any]) -> list[str]:
    """Problems of `engine.args`: keys that we own, with the reason."""
    problems = []
    for name, value in args.items():
        owned = OWNED.get(str(name).replace("-", "_"))
        if owned:
            problems.append(f"engine.args.{name} = {value!r}: not allowed here; {owned}")
    return problems


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
    if options.max_seq_len >= options.context_length - 1:
        args["context_length"] = options.max_seq_len + 8  # SGLang refuses a prompt of context_length
    if options.attention_backend:
        args["attention_backend"] = options.attention_backend
    if options.mem_fraction_static:
        args["mem_fraction_static"] = options.mem_fraction_static
    if options.device == "cpu":
        args.setdefault("attention_backend", "torch_native")
        args.setdefault("mem_fraction_static", 0.1)
        args["max_total_tokens"] = max(CPU_KV_TOKENS, options.max_seq_len + 2 * max(chunk, CPU_CHUNK))
    else:
        args["disable_prefill_cuda_graph"] = True  # measured: no gain at full batches, half a minute at each start
    if options.release == "0.5.17":
        # Fused all-reduce leaves partial sums in the states of five model files (patches/README.md).
        args["enforce_disable_flashinfer_allreduce_fusion"] = True
    return {**args, **options.args}
