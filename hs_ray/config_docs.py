"""The configuration's documentation, made from the schema: docs/configuration.md and `--help`.

`python -m hs_ray.config_docs > docs/configuration.md`, or `make docs`, writes it again.
"""

import dataclasses
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hs_ray.config_schema import BenchJob, DescribeJob, ExportJob, ExtractJob, ProveJob, VerifyJob

JOBS: dict[str, type] = {
    "extract": ExtractJob,
    "verify": VerifyJob,
    "describe": DescribeJob,
    "export": ExportJob,
    "bench": BenchJob,
    "prove": ProveJob,
}


class Key(NamedTuple):
    key: str  # dotted
    type: str
    default: str
    help: str


def fields_of(job_class: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a job, groups after the keys that stand alone."""
    fields = dataclasses.fields(job_class)
    for field in fields:
        if not dataclasses.is_dataclass(field.type):
            yield Key(prefix + field.name, _type_name(field.type), _default(field), field.metadata["help"])
    for field in fields:
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from fields_of(field.type, f"{prefix}{field.name}.")


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(member.name for member in annotation)
    if annotation is Any:
        return "see right"
    if isinstance(annotation, types.UnionType):
        return " | ".join("null" if part is types.NoneType else part.__name__ for part in get_args(annotation))
    return str(annotation).replace("typing.", "") if get_args(annotation) else str(annotation.__name__)


def _default(field: Any) -> str:
    """As it is spelt on the command line."""
    value = field.default_factory() if field.default is dataclasses.MISSING else field.default
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value.name if isinstance(value, Enum) else str(value)


def help_text(job_class: type, config_name: str, conf: Path) -> str:
    """What `python jobs/<job>.py --help` prints."""
    keys = list(fields_of(job_class))
    width = max(len(f"{key.key}={key.default}") for key in keys)
    lines = [f"python jobs/{config_name}.py [KEY=VALUE ...]", ""]
    for entry in keys:
        choices = f" [{entry.type}]" if "|" in entry.type else ""
        lines.append(f"  {f'{entry.key}={entry.default}':<{width}}  {entry.help}{choices}")
    if hasattr(job_class, "__dataclass_fields__") and "model" in job_class.__dataclass_fields__:
        for group, meaning in (("model", "presets"), ("experiment", "whole runs")):
            names = sorted(path.stem for path in (conf / group).glob("*.yaml"))
            lines += ["", f"  {group}=NAME, {meaning}: {', '.join(names)}"]
    lines += ["", "  --cfg job  print the configuration and stop (--resolve: with interpolations filled in)"]
    return "\n".join(lines)


def markdown() -> str:
    """docs/configuration.md, whole."""
    parts = [
        "# Configuration",
        "Made by `python -m hs_ray.config_docs` from `hs_ray/config_schema.py`; a test keeps the two equal.",
        "Keys are given as `KEY=VALUE` after the job: `python jobs/extract.py max_seq_len=4096 engine.tp_size=2`.\n"
        "A preset is a file in `conf/`: `model=qwen3_8b`, `experiment=kimi_k25_8gpu`. New keys are accepted only\n"
        "under `engine.args` (`+engine.args.NAME=VALUE`) and `output.storage_options`; credentials come from the\n"
        "environment and are refused here.",
    ]
    shown: set[Key] = set()
    for name, job_class in JOBS.items():
        known = [key for key in fields_of(job_class) if key in shown]
        keys = [key for key in fields_of(job_class) if key not in shown]
        shown.update(keys)
        rows = [f"| `{key.key}` | {_cell(key.type)} | `{key.default}` | {_cell(key.help)} |" for key in keys]
        also = f"\n\nAlso, as above: {_grouped(known)}." if known else ""
        parts.append(f"## jobs/{name}.py{also}")
        parts.append("\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _grouped(keys: Sequence[Key]) -> str:
    """Their names; of a group that is there as a whole, `group.*`."""
    groups: dict[str, list[str]] = {}
    for entry in keys:
        groups.setdefault(entry.key.partition(".")[0], []).append(entry.key)
    whole = Counter(entry.key.partition(".")[0] for entry in fields_of(ExtractJob))
    return ", ".join(
        f"`{group}.*`" if "." in names[0] and len(names) == whole[group] else ", ".join(f"`{name}`" for name in names)
        for group, names in groups.items()
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
