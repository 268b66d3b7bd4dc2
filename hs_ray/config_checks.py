"""Problems of meaning that need neither model nor output: ranges, sizes, secrets, engine arguments that are ours.

Each problem is one text, `key = value: what is allowed; what to do`, and all of them are found at once. Checks that
need the model (layer ids, context length) or the output (fingerprint) are in `plan`.
"""

from collections.abc import Iterator
from typing import Any

from hs_ray.config_schema import EngineConfig, OutputConfig

SECRET_WORDS = (
    "secret",
    "passw",
    "token",
    "credential",
    "private",
    "access_key",
    "accesskey",
    "customer",
    "key_id",
    "api_key",
    "signature",
)
SECRET_NAMES = ("key", "sas", "auth", "authorization")
NOT_SECRET = ("signature_version", "ssekmskeyid")  # S3 settings that only sound like one

# SGLang server arguments that hs_ray sets itself: name -> why not here, and what to use.
_KEY = "set by {}; use that key"
_NO_SERVER = "no server is run: the engine lives inside a Ray actor"
_NO_CACHE = "the prefix cache must stay off: it skips the tokens it knows, and their states would be missing"
_ONE_FORWARD = "states are captured in plain prefill, in one engine on one node"
# Tried on CUDA with Llama, Qwen3 and Qwen3-MoE: all refused by the capture's own checks, after the model was loaded.
_EAGER = (
    "prefill runs eagerly: a replayed graph passes the hooks by and pads the batch; it gains nothing at full batches"
)
_FUSION = "an all-reduce that is fused into the next norm leaves partial sums where states are captured"
OWNED_ENGINE_ARGS = {
    "model_path": _KEY.format("model.path"),
    "tokenizer_path": _KEY.format("model.tokenizer"),
    "revision": _KEY.format("model.revision"),
    "dtype": _KEY.format("model.dtype"),
    "trust_remote_code": _KEY.format("model.trust_remote_code"),
    "chat_template": _KEY.format("model.chat_template"),
    "device": _KEY.format("engine.device"),
    "tp_size": _KEY.format("engine.tp_size"),
    "tensor_parallel_size": _KEY.format("engine.tp_size"),
    "chunked_prefill_size": _KEY.format("engine.chunked_prefill_size"),
    "mem_fraction_static": _KEY.format("engine.mem_fraction_static"),
    "attention_backend": _KEY.format("engine.attention_backend"),
    "dp_size": "engines are copied by engine.replicas; use that key",
    "data_parallel_size": "engines are copied by engine.replicas; use that key",
    "context_length": "follows from max_seq_len; use that key",
    "disable_radix_cache": _NO_CACHE,
    "enable_hierarchical_cache": _NO_CACHE,
    "enable_mixed_chunk": "only prompt tokens are computed: there is nothing to mix",
    "allow_auto_truncate": "prompts are cut by max_seq_len and on_too_long alone, so that every token is accounted for",
    "skip_tokenizer_init": "token ids go straight into the engine",
    "enable_return_hidden_states": "states leave through shared memory, not through SGLang's responses",
    "enable_return_aux_hidden_states": "states leave through shared memory, not through SGLang's responses",
    "base_gpu_id": "GPUs are given to an engine by Ray",
    "gpu_id_step": "GPUs are given to an engine by Ray",
    "nccl_port": "chosen per engine, so that several fit on one node",
    "pp_size": f"{_ONE_FORWARD}; use engine.tp_size",
    "pipeline_parallel_size": f"{_ONE_FORWARD}; use engine.tp_size",
    "nnodes": f"{_ONE_FORWARD}; use engine.replicas for more nodes",
    "node_rank": f"{_ONE_FORWARD}; use engine.replicas for more nodes",
    "dist_init_addr": f"{_ONE_FORWARD}; use engine.replicas for more nodes",
    "enable_two_batch_overlap": _ONE_FORWARD,
    "enable_layernorm_sp": f"{_ONE_FORWARD}; it would spread a state over the GPUs",
    "speculative_algorithm": f"{_ONE_FORWARD}; with speculation there would be fewer states than tokens",
    "disaggregation_mode": _ONE_FORWARD,
    "host": _NO_SERVER,
    "port": _NO_SERVER,
    "api_key": _NO_SERVER,
    "max_prefill_tokens": "follows from engine.chunked_prefill_size; use that key",
    "disable_decode_cuda_graph": "no decode step is ever run",
    "disable_prefill_cuda_graph": _EAGER,
    "cuda_graph_backend_prefill": _EAGER,
    "cuda_graph_config": _EAGER,
    "enable_pdmux": f"{_ONE_FORWARD}; split prefill goes around the capture",
    "enable_single_batch_overlap": f"{_ONE_FORWARD}; it goes around the loop that captures",
    "attn_cp_size": f"{_ONE_FORWARD}; context parallelism spreads a sample's rows over the GPUs",
    "enable_prefill_cp": f"{_ONE_FORWARD}; context parallelism spreads a sample's rows over the GPUs",
    "enable_dp_attention": f"{_ONE_FORWARD}; with it each rank holds other samples' rows: use engine.replicas",
    "attn_dp_size": f"{_ONE_FORWARD}; with it each rank holds other samples' rows: use engine.replicas",
    "enable_lmcache": _NO_CACHE,
    "speculative_draft_model_path": f"{_ONE_FORWARD}; with speculation there would be fewer states than tokens",
    "enable_lora": "adapters change the states without changing the model's digest: merge them into a folder",
    "lora_paths": "adapters change the states without changing the model's digest: merge them into a folder",
    "forward_hooks": "other hooks on the same modules could change what is captured",
    "use_ray": "the engine runs below hs_ray's own actor",
    "enforce_disable_flashinfer_allreduce_fusion": _FUSION,
    "enable_flashinfer_allreduce_fusion": _FUSION,
    "enable_multimodal": "prompts are token ids, and classes are proven without the processor of pictures",
    "sampling_backend": "nothing is sampled",
    "grammar_backend": "nothing is sampled",
    "sleep_on_idle": "an engine that waits for the disk must leave its core to the writers",
}
DEVICES = ("auto", "cuda", "cpu")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def check(job: Any) -> list[str]:
    """All problems of a job of any kind, in the order of its keys."""
    problems: list[str] = []
    if hasattr(job, "max_seq_len") and job.max_seq_len < 1:
        problems.append(
            _text("max_seq_len", job.max_seq_len, "a whole number of tokens, 1 or more; for example max_seq_len=8192")
        )
    if hasattr(job, "model") and job.model.dtype != "bfloat16":
        problems.append(
            _text("model.dtype", job.model.dtype, "bfloat16, the one dtype that states are stored in; leave it out")
        )
    if hasattr(job, "engine"):
        problems += _engine_problems(job.engine)
    if hasattr(job, "input"):
        if not 0 <= job.input.max_rejected <= 1:
            problems.append(
                _text("input.max_rejected", job.input.max_rejected, "a share from 0 to 1; for example 0.01")
            )
        if job.input.limit is not None and job.input.limit < 1:
            problems.append(_text("input.limit", job.input.limit, "null, or 1 or more lines"))
        if job.input.path is not None and not _is_path_or_paths(job.input.path):
            problems.append(
                _text("input.path", job.input.path, "a file, a glob, a folder, or a list of them that is not empty")
            )
        if job.input.path is not None and job.output.path is None and not job.dry_run:
            problems.append(
                _text("output.path", None, "a folder or s3://bucket/prefix; say where the states of this input go")
            )
    if hasattr(job, "output"):
        problems += _output_problems(job.output)
    if hasattr(job, "cluster"):
        for name, least in (
            ("max_retries", 0),
            ("progress_seconds", 0.1),
            ("lease_seconds", 1),
        ):
            value = getattr(job.cluster, name)
            if not value >= least:
                problems.append(_text(f"cluster.{name}", value, f"{least} or more"))
        units = job.cluster.prefetch_units
        if units != "auto" and not _is_positive(units):
            problems.append(_text("cluster.prefetch_units", units, "auto, or a whole number of units, 1 or more"))
        rate = job.cluster.tokens_per_second
        if rate is not None and not rate > 0:
            problems.append(_text("cluster.tokens_per_second", rate, "null, or more than 0"))
    for group, name, least in (
        ("verify", "samples", 1),
        ("verify", "seed", 0),
        ("export", "workers", 1),
        ("prove", "seed", 0),
        ("prove", "limit_seconds", 1),
        ("bench", "tokens", 1),
        ("bench", "repeats", 1),
    ):
        if hasattr(job, group) and getattr(getattr(job, group), name) < least:
            problems.append(_text(f"{group}.{name}", getattr(getattr(job, group), name), f"{least} or more"))
    if hasattr(job, "verify") and job.verify.device not in DEVICES:
        problems.append(_text("verify.device", job.verify.device, "auto, cuda or cpu"))
    return problems


def _engine_problems(engine: EngineConfig) -> Iterator[str]:
    if engine.device not in DEVICES:
        yield _text("engine.device", engine.device, "auto, cuda or cpu")
    if engine.tp_size < 1:
        yield _text("engine.tp_size", engine.tp_size, "a whole number of GPUs, 1 or more")
    if engine.replicas != "auto" and not _is_positive(engine.replicas):
        yield _text("engine.replicas", engine.replicas, "auto, or a whole number of engines, 1 or more")
    if engine.max_inflight_tokens != "auto" and not _is_positive(engine.max_inflight_tokens):
        yield _text(
            "engine.max_inflight_tokens", engine.max_inflight_tokens, "auto, or a whole number of tokens, 1 or more"
        )
    size = engine.chunked_prefill_size
    if size is not None and size < 1 and size != -1:
        yield _text("engine.chunked_prefill_size", size, "null, a whole number of tokens, or -1 for no splitting")
    fraction = engine.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        yield _text("engine.mem_fraction_static", fraction, "null, or a share between 0 and 1; for example 0.8")
    for name, value in engine.args.items():
        spelling = str(name).replace("-", "_").lstrip("_")
        if spelling in OWNED_ENGINE_ARGS:
            yield _text(f"engine.args.{name}", value, OWNED_ENGINE_ARGS[spelling])
        if spelling == "load_format" and value not in LOAD_FORMATS:
            allowed = f"one of {', '.join(LOAD_FORMATS)}; other formats run code when read"
            yield _text(f"engine.args.{name}", value, allowed)


def _output_problems(output: OutputConfig) -> Iterator[str]:
    if output.node_path is not None and not output.node_path.startswith(("/", "$")):
        yield _text(
            "output.node_path", output.node_path, "null, or an absolute path on every node; variables are allowed"
        )
    for name in ("shard_bytes", "min_free_bytes"):
        try:
            parse_bytes(getattr(output, name))
        except ValueError as error:
            yield _text(f"output.{name}", getattr(output, name), str(error))
    for key, value in _leaves("output.storage_options", output.storage_options):
        # The value is not repeated: this text goes to logs.
        if _sounds_secret(key.rsplit(".", 1)[1]) or ("://" in str(value) and "@" in str(value)):
            yield (
                f"{key} = (hidden): looks like a secret, and the configuration is written to run.json; "
                f"give credentials through the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, a role)"
            )


def _leaves(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(f"{prefix}.{name}", value)
    else:
        yield prefix, node


def _sounds_secret(name: str) -> bool:
    lowered = name.lower()
    return lowered not in NOT_SECRET and (lowered in SECRET_NAMES or any(word in lowered for word in SECRET_WORDS))


def _text(key: str, value: Any, allowed: str) -> str:
    return f"{key} = {'null' if value is None else value}: {allowed}"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_path_or_paths(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return bool(paths) and all(isinstance(path, str) and path for path in paths)


UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int) -> int:
    """`1GiB`, `500MB`, `1048576` -> bytes. Raises ValueError that says what is allowed."""
    cleaned = str(text).strip().replace("_", "")
    number = cleaned.rstrip("kmgtibKMGTIB ")
    unit = cleaned[len(number) :].strip().upper()
    try:
        value = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError("a size such as 1GiB, 500MB or 1048576") from None
    if value < 0:
        raise ValueError("a size of 0 or more")
    return value
