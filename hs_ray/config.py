"""`load()`: Hydra's composition of conf/ and the command line, with errors that a user can act on; and `run_job()`.

Hydra itself would exit 1, one problem at a time, in words of its own. Here every override is looked at before it
composes, so a misspelt key, a wrong type and a value out of range all read `key = value: what is allowed; what to do`,
and exit with 2.
The keys are in `config_schema`, the checks of meaning in `config_checks`.
"""

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hs_ray.config_checks import check, parse_bytes
from hs_ray.config_docs import fields_of, help_text
from hs_ray.config_schema import (
    DEMO_OUTPUT,
    BenchConfig,
    BenchJob,
    CaptureConfig,
    ClusterConfig,
    Compression,
    DescribeJob,
    EngineConfig,
    ExportConfig,
    ExportJob,
    ExportTarget,
    ExtractJob,
    Final,
    InputConfig,
    InputFormat,
    ModelConfig,
    OnExisting,
    OnTooLong,
    OutputConfig,
    Prove,
    ProveConfig,
    ProveJob,
    Reference,
    VerifyConfig,
    VerifyJob,
)
from hs_ray.errors import ConfigError, HsRayError

__all__ = [
    "DEMO_OUTPUT", "BenchConfig", "BenchJob", "CaptureConfig", "ClusterConfig", "Compression", "DescribeJob",
    "EngineConfig", "ExportConfig", "ExportJob", "ExportTarget", "ExtractJob", "Final", "InputConfig", "InputFormat",
    "ModelConfig", "OnExisting", "OnTooLong", "OutputConfig", "Prove", "ProveConfig", "ProveJob",
    "Reference", "VerifyConfig", "VerifyJob",
    "check", "data_path", "load", "parse_bytes", "run_job", "to_plain",
]  # fmt: skip

JobT = TypeVar("JobT")
OPEN_KEYS = ("engine.args", "output.storage_options")  # where `+new.key=` is accepted
TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list such as [512,2048]",
}
OPTIONS = "options are --help, and --cfg job (print the configuration and stop), with --resolve"


def data_path(name: str) -> Path:
    """`conf`, `patches` or `demo`: inside the installed package, or beside it in a checkout."""
    packaged = Path(__file__).parent / name
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / name


def load(job_class: type[JobT], config_name: str, overrides: Sequence[str], *, checked: bool = True) -> JobT:
    """Compose conf/<config_name>.yaml with the overrides into `job_class`.

    `checked=False` leaves the checks of meaning to the caller, who has more of them and reports all at once: `plan`.
    Raises ConfigError with every problem found.
    """
    composed = _compose(job_class, config_name, overrides)
    try:
        job: Any = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_composition_text(error)) from error
    if checked and (problems := check(job)):
        raise ConfigError(problems)
    return job  # to_object gives the schema's class


def _compose(job_class: type, config_name: str, overrides: Sequence[str]) -> DictConfig:
    groups = {"model", "experiment"} if _annotation("model", job_class) else set()
    problems: list[str] = []
    prepared = [_prepare(override, job_class, groups, problems) for override in overrides]
    if problems:
        raise ConfigError(problems)
    ConfigStore.instance().store(name=f"{config_name}_schema", node=job_class)
    try:
        with hydra.initialize_config_dir(str(data_path("conf")), version_base="1.3"):
            return hydra.compose(config_name, overrides=prepared)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_composition_text(error)) from error


def _prepare(override: str, job_class: type, groups: set[str], problems: list[str]) -> str:
    """Check one override against the schema; return it in the spelling that Hydra takes without surprises."""
    spelt, equals, raw = override.partition("=")
    key = spelt.strip().lstrip("+")
    if not equals or not key or spelt.startswith(("-", "~")):
        problems.append(f"{override}: not a KEY=VALUE; {OPTIONS}")
        return override
    shown = "(hidden)" if key.startswith("output.storage_options") else raw  # may be a secret in the wrong place
    if key in groups or key.startswith("hydra."):
        return override.lstrip("+")
    if any(key.startswith(f"{open_key}.") for open_key in OPEN_KEYS):
        ready = f"++{key}={raw}"  # so that it need not matter whether a preset has the key already
    elif (annotation := _annotation(key, job_class)) is None:
        problems.append(_unknown_key_text(key, raw, job_class))
        return override
    else:
        ready = f"{'++' if key in OPEN_KEYS else ''}{key}={_quoted(raw, key, annotation)}"
    try:
        parsed = OverridesParser.create().parse_override(ready)
        schema = OmegaConf.structured(job_class)
        if raw.strip() == "???":  # OmegaConf's mark of a value that is still missing
            raise ValueError
        OmegaConf.update(schema, key, parsed.value(), merge=True, force_add=True)
    except HydraException as error:
        why = "" if shown != raw else f" ({_one_line(error)})"
        problems.append(f"{key} = {shown}: not understood{why}; a list is [a,b]; quote it for the shell: '{key}=[a,b]'")
    except (OmegaConfBaseException, ValueError):
        problems.append(f"{key} = {shown}: {_allowed(key, job_class)}")
    return ready


def _annotation(key: str, job_class: type) -> Any:
    """The type that the schema gives a dotted key; None if there is no such key."""
    node: Any = job_class
    for part in key.split("."):
        known = {field.name: field.type for field in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else {}
        if part not in known:
            return None
        node = known[part]
    return node


def _quoted(raw: str, key: str, annotation: Any) -> str:
    """Text is taken as it is: a path with spaces, commas or `=`, a revision that looks like a number."""
    is_text = (
        annotation is str or str in get_args(annotation) or (key == "input.path" and not raw.lstrip().startswith("["))
    )
    if not is_text or raw in ("null", "") or raw[0] in "'\"":
        return raw
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), raw)
    return f"'{escaped}'"


def _allowed(key: str, job_class: type) -> str:
    """What a key takes, from its type and its documentation."""
    annotation = _annotation(key, job_class)
    kinds = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    documentation = next((entry.help for entry in fields_of(job_class) if entry.key == key), "")
    words = []
    for kind in kinds:
        if kind is types.NoneType:
            words.append("null")
        elif isinstance(kind, type) and issubclass(kind, Enum):
            if not all(member.name in documentation for member in kind):
                words.append(f"one of {', '.join(member.name for member in kind)}")
        elif dataclasses.is_dataclass(kind):
            words.append(
                f"a group of keys; set them one by one, for example {key}.{dataclasses.fields(kind)[0].name}=VALUE"
            )
        elif get_origin(kind) is dict:
            words.append(f"set it name by name, +{key}.NAME=VALUE")
        elif kind is not Any:
            words.append(TYPE_WORDS[get_origin(kind) or kind])
    return ", ".join(filter(None, (" or ".join(words), documentation)))


def _unknown_key_text(key: str, raw: str, job_class: type) -> str:
    """Names the keys of the deepest group that the key does reach."""
    parts = key.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        group = ".".join(parts[:depth])
        node = _annotation(group, job_class) if group else job_class
        if dataclasses.is_dataclass(node):
            names = ", ".join(field.name for field in dataclasses.fields(node))
            where = f"keys of {group}" if group else "keys"
            new = (
                f"; new keys are accepted only under {' and '.join(OPEN_KEYS)}" if group in ("engine", "output") else ""
            )
            return f"{key} = {raw}: no such key; {where}: {names}{new}"
    raise AssertionError(key)  # the job itself is a dataclass


def _composition_text(error: Exception) -> str:
    """What is left to Hydra: presets that do not exist or have a mistake in them, interpolations, missing values."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group} = {name}: no such preset; there are: {', '.join(error.options or [])}"
    cause: BaseException = error
    while isinstance(cause.__cause__, HydraException | OmegaConfBaseException):
        cause = cause.__cause__
    key = getattr(cause, "full_key", None)
    return f"{key}: {_one_line(error)}" if key else _one_line(error)


def _one_line(error: Exception) -> str:
    noise = ("full_key", "object_type", "reference_type", "See https://", "Set the environment variable")
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(noise) and line != "^")


def to_plain(job: Any) -> dict[str, Any]:
    """A job's configuration as JSON-ready dicts, lists and scalars (enums by name)."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, dict):
            return {str(name): plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    result: dict[str, Any] = plain(dataclasses.asdict(job))
    return result


def _needs_output(job: Any) -> bool:
    """Whether the user must say where states go: with an input of their own, unless nothing is written. See `check`."""
    return hasattr(job, "input") and job.input.path is not None and not job.dry_run


def run_job(job_class: type[JobT], config_name: str, body: Callable[[JobT], int], *, checked: bool = True) -> None:
    """Load, run, and leave with the job's exit code: what every `jobs/*.py` ends in.

    An error whose message says it all is printed alone, on stderr; any other keeps its traceback (exit code 1).
    """
    args = sys.argv[1:]
    try:
        if {"-h", "--help"} & set(args):
            print(help_text(job_class, config_name, data_path("conf")))
            code = 0
        elif args[:2] in (["--cfg", "job"], ["-c", "job"]):
            rest = [arg for arg in args[2:] if arg != "--resolve"]
            print(OmegaConf.to_yaml(_compose(job_class, config_name, rest), resolve="--resolve" in args))
            code = 0
        else:
            job = load(job_class, config_name, args, checked=checked)
            if hasattr(job, "output") and not _needs_output(job):
                job.output.path = job.output.path or DEMO_OUTPUT
            code = body(job)
    except HsRayError as error:
        if not error.plain:
            raise
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        code = error.exit_code
    except OSError as error:
        from hs_ray.storage import is_outage  # only here: it brings pyarrow, for which --help need not wait

        if not is_outage(error):  # a disk, or a store that was asked for ten minutes, is no fault of the code
            raise
        print(f"\n{config_name} failed: {error}; run the same command again\n", file=sys.stderr, flush=True)
        code = 1
    sys.exit(code)
