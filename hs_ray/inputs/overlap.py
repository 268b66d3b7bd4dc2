"""Input and output must not lie in one another: the next start would take shards and plan for more input."""

import os
import posixpath
from fnmatch import fnmatchcase
from pathlib import Path

from hs_ray.config import InputConfig, OutputConfig

Place = tuple[str, ...]  # the kind of store, then the folders; of an input they may be patterns

# One of each kind of file that a run makes, as patterns without `**` would find them.
MADE = [
    ("manifest.json",),
    ("_rejects", "input-00000.jsonl"),
    ("_run", "run.json"),
    ("_run", "index", "0123456789abcdef.jsonl"),
    ("_run", "done", "unit-000000.json"),
    ("_run", "samples", "part-00000.parquet"),
    ("shards", "unit-000000-0001-01234567.parquet"),
]


def overlaps(config: InputConfig, output: OutputConfig) -> list[str]:
    """A problem for each entry of `input.path` that lies in the output, or has the output in it."""
    given = [config.path] if isinstance(config.path, str) else list(config.path or ())
    problems = []
    for path in given:
        source = _place(_folder(path))
        for key, folder in (("output.path", output.path), ("output.node_path", output.node_path)):
            if folder and _finds(source, _place(os.path.expandvars(folder))):
                problems.append(
                    f"{key} = {folder}: it lies in input.path = {path}, and its files would be read as input; "
                    "choose a folder outside of it"
                )
            elif (
                folder and key == "output.path" and _lies_in(source, _place(folder))
            ):  # a node's disk holds other things
                problems.append(
                    f"input.path = {path}: it lies in output.path = {folder}, which is for what is written there; "
                    "choose another folder for one of them"
                )
    return problems


def _folder(path: str) -> str:
    """Of a pattern with `**`, which goes down into folders, the one that it begins in; else the path as it is."""
    return posixpath.dirname(path.split("**")[0]) or "." if "**" in path else path


def _place(path: str) -> Place:
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        return ("s3" if scheme == "s3a" else scheme, *(part for part in rest.split("/") if part))
    return ("", *Path(rest if separator else path).expanduser().resolve().parts)


def _finds(source: Place, output: Place) -> bool:
    """Whether an input, a folder or a pattern, has files of the output among its own."""
    files = [(*output, *made) for made in MADE]
    return _lies_in(output, source) or any(len(file) == len(source) and _lies_in(file, source) for file in files)


def _lies_in(inner: Place, outer: Place) -> bool:
    within = zip(inner, outer, strict=False)
    return len(inner) >= len(outer) and all(name == part or fnmatchcase(name, part) for name, part in within)
