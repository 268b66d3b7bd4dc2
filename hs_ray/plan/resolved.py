"""The job and its model, checked against each other: frozen, and everything later derives from it."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from hs_ray.config import ExtractJob, ModelConfig, OnTooLong, check, parse_bytes, to_plain
from hs_ray.errors import ConfigError, UserError
from hs_ray.inputs import Source, TokenizeSettings, content_digests, overlaps
from hs_ray.model import ModelInfo, chat_template, resolve_model, tokenizer_digest, tokenizer_files_digest
from hs_ray.schema import FORMAT_VERSION, CaptureSpec, resolve_layers

# SGLang arguments that change neither values nor rows; any other one is part of the fingerprint, known to us or not.
NEUTRAL_ENGINE_ARGS = frozenset(
    [
        "log_level",
        "log_requests",
        "show_time_cost",
        "watchdog_timeout",
        "soft_watchdog_timeout",
        "dist_timeout",
        "download_dir",
        "max_running_requests",
        "max_total_tokens",
        "stream_interval",
        "random_seed",
        "weight_loader_disable_mmap",
        "model_loader_extra_config",
    ]
)


OF_THE_PLACE = ("name", "path", "tokenizer_path", "digest")  # of a ModelInfo: one model may differ in these


@dataclass(frozen=True)
class ResolvedJob:
    job: ExtractJob
    model: ModelInfo
    spec: CaptureSpec
    tokenizer_digest: str | None = None  # of the files that the driver has; None: other nodes' are not checked

    @property
    def pinned_model(self) -> ModelConfig:
        """For other nodes: of a hub model the commit that the driver found, whatever is pushed during the run."""
        return replace(self.job.model, revision=self.model.revision)

    @property
    def unit_tokens(self) -> int:
        """Tokens that a unit, which becomes one shard, aims at."""
        return max(1, parse_bytes(self.job.output.shard_bytes) // self.spec.bytes_per_token)

    @property
    def tokenize_settings(self) -> TokenizeSettings:
        """What the tasks that read the input need."""
        job = self.job
        return TokenizeSettings(
            vocab_size=self.model.vocab_size,
            max_seq_len=job.max_seq_len,
            truncate=job.on_too_long is OnTooLong.truncate,
            id_key=job.input.id_key,
            allow_empty_mask=job.input.allow_empty_mask,
            limit=job.input.limit,
            model=self.pinned_model,
            template=chat_template(job.model),
            tokenizer_digest=self.tokenizer_digest,
        )


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """What the user must change, found in here, joins `problems` instead of ending the search for more."""
    try:
        yield
    except UserError as error:
        problems += error.problems if isinstance(error, ConfigError) else [str(error)]


def resolve(job: ExtractJob, check_model: Callable[[ModelInfo], None] | None = None) -> ResolvedJob:
    """Raises ConfigError with every problem of meaning at once, those that need the model to be seen among them.

    check_model: raises a UserError for a model that what runs it does not support.
    """
    problems = check(job)
    model: ModelInfo | None = None
    with collecting(problems):
        model = resolve_model(job.model, weights=not job.dry_run)
    if model is not None:
        problems += _problems_with(model, job, check_model)
    with collecting(problems):
        chat_template(job.model)
    problems += overlaps(job.input, job.output)
    if problems or model is None:
        raise ConfigError(problems)
    layers = resolve_layers(job.layers, model.num_hidden_layers)
    spec = CaptureSpec(layers, job.capture.final.value, model.num_hidden_layers, model.hidden_size)
    return ResolvedJob(job, model, spec, tokenizer_files_digest(model))


def _problems_with(model: ModelInfo, job: ExtractJob, check_model: Callable[[ModelInfo], None] | None) -> list[str]:
    problems: list[str] = []
    if check_model is not None:
        with collecting(problems):
            check_model(model)
    with collecting(problems):
        resolve_layers(job.layers, model.num_hidden_layers)
    if job.max_seq_len > model.context_length:
        problems.append(
            f"max_seq_len = {job.max_seq_len}: at most the context of {model.name}, {model.context_length} tokens; "
            f"for example max_seq_len={model.context_length}"
        )
    return problems


def fingerprint(
    resolved: ResolvedJob, sources: Sequence[Source], versions: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """(sha256, its parts by the key that a user would change) over everything that decides values and rows.

    versions: of the engine; `sglang`, `patch` and `capture`, the way of the model's class, count. Reads the whole
    input once, for its digest.
    """
    job, plain = resolved.job, to_plain(resolved.job)
    args = {
        key: value for key, value in plain["engine"]["args"].items() if key.replace("-", "_") not in NEUTRAL_ENGINE_ARGS
    }
    parts = {
        "format_version": FORMAT_VERSION,
        "model.path": resolved.model.digest,
        "model.dtype": job.model.dtype,
        "model.tokenizer, model.chat_template": tokenizer_digest(resolved.model, job.model),
        "layers": list(resolved.spec.layers),
        "capture.final": resolved.spec.final,
        "max_seq_len": job.max_seq_len,
        "on_too_long": plain["on_too_long"],
        "input.path": digest(content_digests(sources)),
        "input.format": [source.format for source in sources],
        "input.id_key": job.input.id_key,
        "input.limit": job.input.limit,
        "input.allow_empty_mask": job.input.allow_empty_mask,
        "output.compression": plain["output"]["compression"],
        "engine.args": args,
        "sglang": versions.get("sglang"),
        "patches/sglang": versions.get("patch"),
        "engine/models": versions.get("capture"),
    }
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for key, value in parts.items()
    }
    return digest(texts), texts


def without_weights(
    key: tuple[str, dict[str, str]], model: ModelInfo, run: Mapping[str, Any] | None
) -> tuple[str, dict[str, str]]:
    """The fingerprint of a dry run, which has not seen the weights, as it compares with an earlier start's run.json.

    Their digest is taken from there, unless something that the dry run does know says that it is another model.
    """
    there = (run or {}).get("fingerprint_parts", {}).get("model.path")
    known = asdict(model).items()
    then = (run or {}).get("model", {})
    if there is None or any(then.get(name, now) != now for name, now in known if name not in OF_THE_PLACE):
        return key
    parts = key[1] | {"model.path": there}
    return digest(parts), parts


def differing_keys(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """`key = now (was before)` for every part of two fingerprints that differs."""
    keys = sorted(old.keys() | new.keys())
    return [f"{key} = {new.get(key)} (was {old.get(key)})" for key in keys if old.get(key) != new.get(key)]


def digest(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
