"""Input and output must not lie in one another: the next start would take shards and plan for more input."""

import os
import posixpath
from pathlib import Path

from hs_ray.config import InputConfig, OutputConfig

Place = tuple[str, ...]  # the kind of store, then the folders


def overlaps(config: InputConfig, output: OutputConfig) -> list[str]:
    """A problem for each entry of `input.path` that lies in the output, or has the output in it."""
    given = [config.path] if isinstance(config.path, str) else list(config.path or ())
    problems = []
    for path in given:
        source = _place(_folder(path))
        for key, folder in (("output.path", output.path), ("output.node_path", output.node_path)):
            if folder and _lies_in(_place(os.path.expandvars(folder)), source):
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


def _lies_in(inner: Place, outer: Place) -> bool:
    return inner[: len(outer)] == outer
