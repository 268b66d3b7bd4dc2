"""Every configuration key, its type, default and meaning: one dataclass a group, one root dataclass a job.

A field's `help` is its documentation: `docs/configuration.md` and `--help` are made from it. Not frozen, because
OmegaConf makes a frozen one refuse every override; `plan.resolve` gives the frozen view that is shipped to workers.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

DEMO_OUTPUT = "outputs/demo"  # output.path when neither it nor input.path is given


def _key(default: Any, help: str) -> Any:
    """A field with its documentation; mutable defaults are copied."""
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


class Final(StrEnum):
    pre_norm = "pre_norm"
    post_norm = "post_norm"
    both = "both"
    none = "none"


class OnTooLong(StrEnum):
    truncate = "truncate"
    reject = "reject"


class Prove(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


class InputFormat(StrEnum):
    auto = "auto"
    tokens = "tokens"
    messages = "messages"
    conversations = "conversations"
    text = "text"


class Compression(StrEnum):
    none = "none"
    split_zstd = "split_zstd"


class OnExisting(StrEnum):
    resume = "resume"
    fail = "fail"


class Reference(StrEnum):
    none = "none"
    hf = "hf"
    argmax = "argmax"


class ExportTarget(StrEnum):
    speculators = "speculators"
    specforge = "specforge"
    modelopt = "modelopt"
    speculators_v1 = "speculators_v1"


@dataclass
class ModelConfig:
    path: str = _key(
        "builtin:smollm2", "folder or hub name; builtin:smollm2 and builtin:tiny_random are made on first use"
    )
    revision: str | None = _key(None, "hub revision; null: the newest")
    dtype: str = _key("bfloat16", "dtype of the weights and of the states; bfloat16 only")
    trust_remote_code: bool = _key(False, "run Python code that comes with the model folder")
    tokenizer: str | None = _key(None, "folder or hub name of the tokenizer; null: the model's")
    chat_template: str | None = _key(None, "file with a Jinja chat template; null: the tokenizer's own")


@dataclass
class EngineConfig:
    device: str = _key("auto", "auto, cuda or cpu")
    tp_size: int = _key(1, "GPUs of one engine (tensor parallelism)")
    replicas: Any = _key("auto", "number of engines; auto: GPUs // tp_size, 1 on CPU")
    chunked_prefill_size: int | None = _key(
        None, "most tokens of one forward pass; longer prompts are split; null: 16384 on CUDA, 2048 on CPU"
    )
    mem_fraction_static: float | None = _key(None, "share of GPU memory for weights and KV pool; null: SGLang's choice")
    attention_backend: str | None = _key(None, "SGLang attention backend; null: SGLang's choice, torch_native on CPU")
    max_inflight_tokens: Any = _key(
        "auto", "tokens admitted to one engine and not yet written; sets the size of the shared memory"
    )
    args: dict[str, Any] = _key({}, "any other SGLang server argument: +engine.args.NAME=VALUE")


@dataclass
class CaptureConfig:
    final: Final = _key(Final.pre_norm, "the state after the last layer: pre_norm, post_norm, both or none")
    canary: bool = _key(True, "check every engine before its first unit")
    prove: Prove = _key(
        Prove.auto, "compare this model class with transformers first: auto (where no proof exists), always, never"
    )


@dataclass
class InputConfig:
    path: Any = _key(
        None, "file, glob, folder or list; local or s3://; .jsonl, .jsonl.gz, .jsonl.zst; null: the demo's samples"
    )
    format: InputFormat = _key(InputFormat.auto, "tokens, messages, conversations, text; auto: recognised per file")
    id_key: str = _key("id", "key of a line that holds its id; lines without one get a hash of source and line")
    limit: int | None = _key(None, "use only the first LIMIT lines")
    max_rejected: float = _key(0.01, "stop before the engine starts if a larger share of the lines is rejected")
    allow_empty_mask: bool = _key(False, "keep samples whose loss mask is all zero")


@dataclass
class OutputConfig:
    path: str | None = _key(None, "folder or s3://bucket/prefix; null: outputs/demo, unless input.path is given")
    node_path: str | None = _key(
        None, "folder on each node's own disk for the shards; the rest stays in output.path, which all nodes see"
    )
    redo_lost: bool = _key(False, "with node_path: do units again whose shards are on disks that are not there")
    shard_bytes: str = _key("1GiB", "aimed size of a shard, which is one unit of work")
    compression: Compression = _key(Compression.none, "none, or split_zstd (lossless, about 0.68 of the bytes)")
    on_existing: OnExisting = _key(OnExisting.resume, "resume an output made with the same configuration, or fail")
    storage_options: dict[str, Any] = _key(
        {}, "for s3://: endpoint_url, anon, ...; credentials come from the environment"
    )
    min_free_bytes: str = _key("2GiB", "pause while the disk has less room than this")


@dataclass
class ClusterConfig:
    address: str = _key(
        "auto", "Ray address; auto: a running cluster, else one of this machine; local: one of this machine"
    )
    max_retries: int = _key(2, "deaths of an engine that a unit may take part in before it is set aside")
    prefetch_units: Any = _key(
        "auto", "units in one engine at once, a writer each; auto: 4; 8 with split_zstd or tp_size > 1"
    )
    grace_seconds: float = _key(
        0.0, "on SIGTERM, seconds in which the units in hand are finished; 0: they are dropped at once"
    )
    progress_seconds: float = _key(5.0, "seconds between progress lines")
    lease_seconds: float = _key(60.0, "after this long without a sign of life a driver's lease has ended")
    tokens_per_second: float | None = _key(
        None, "tokens/s expected of one engine, for the estimate; null: as measured, when a run is resumed"
    )


@dataclass
class ExtractJob:
    """jobs/extract.py"""

    layers: Any = _key("eagle3", "eagle3, a list of layer ids, or all")
    max_seq_len: int = _key(8192, "longest sample in tokens, at most the model's context")
    on_too_long: OnTooLong = _key(OnTooLong.truncate, "truncate or reject longer samples")
    dry_run: bool = _key(False, "print the estimate and stop: no engine, no GPU")
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass
class VerifyConfig:
    reference: Reference = _key(
        Reference.none,
        "none: integrity alone; hf: compare values with transformers; argmax: next tokens that the final state "
        "names, against the text",
    )
    samples: int = _key(16, "samples compared with the reference")
    seed: int = _key(0, "which samples")
    device: str = _key("auto", "device of the reference: auto, cpu or cuda")
    logprobs: bool = _key(True, "argmax: compare with the engine's own log-probabilities too, which starts SGLang")
    incomplete: bool = _key(False, "accept an unfinished run and check what is committed")


@dataclass
class VerifyJob:
    """jobs/verify.py"""

    output: OutputConfig = field(default_factory=OutputConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    model_path: str | None = _key(None, "the model's folder, if it is no longer where run.json says")


@dataclass
class DescribeJob:
    """jobs/describe.py"""

    output: OutputConfig = field(default_factory=OutputConfig)
    report: bool = _key(False, "also write a page about the run, _run/report.html")


@dataclass
class ExportConfig:
    to: ExportTarget = _key(ExportTarget.speculators, "speculators, specforge, modelopt or speculators_v1")
    path: str | None = _key(None, "target folder")
    workers: int = _key(2, "parallel processes")
    incomplete: bool = _key(False, "export what is committed of an unfinished run")
    draft_vocab_size: int | None = _key(None, "also write vocabulary mapping files for a draft vocabulary of this size")


@dataclass
class ExportJob:
    """jobs/export.py"""

    output: OutputConfig = field(default_factory=OutputConfig)
    export: ExportConfig = field(default_factory=ExportConfig)


@dataclass
class ProveConfig:
    limit_seconds: float = _key(900.0, "end the proof after this long")
    seed: int = _key(0, "of the random weights and prompts")


@dataclass
class ProveJob:
    """jobs/prove.py"""

    prove: ProveConfig = field(default_factory=ProveConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass
class BenchConfig:
    prompt_tokens: list[int] = _key([512], "prompt lengths, each timed on its own")
    mix: bool = _key(False, "also time a mix of lengths: median 1,500, tail to 8,192")
    tokens: int = _key(20000, "tokens of one timing")
    repeats: int = _key(3, "timings of each way; the median counts")
    path: str | None = _key(None, "where capture + write writes; null: /dev/shm")
    side_by_side: bool | None = _key(
        None, "an engine for each way at once, timed in turn, instead of one after the other; null: on CPU only"
    )
    transformers: bool = _key(False, "also time transformers + hooks + torch.save")
    whole_job: bool = _key(True, "also time the whole job through Ray Data")
    replicas: list[int] = _key([], "instead: the whole job with each of these numbers of engines, against the first")
    plan_samples: int = _key(0, "instead: plan this many made-up samples of 1,000 tokens")
    plan_chats: int = _key(0, "instead: plan this many made-up chats, tokenized with the model's tokenizer")
    read: str | None = _key(None, "instead: read this output, local or s3://, with and without workers")
    json: str | None = _key(None, "also write the result to this file")


@dataclass
class BenchJob(ExtractJob):
    """jobs/bench.py: the keys of extract, and its own"""

    bench: BenchConfig = field(default_factory=BenchConfig)
