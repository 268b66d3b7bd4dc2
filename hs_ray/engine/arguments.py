"""Which server arguments the installed SGLang knows: read from its sources, since importing it takes half a minute."""

import ast
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from hs_ray.engine.patching import sglang_root
from hs_ray.errors import ConfigError

# 0.5.17 has them all as fields of one class, 0.5.23 in a file a subject.
PLACES = ("server_args.py", "arg_groups/fields/*.py")


def known_arguments() -> set[str]:
    """Names of the fields of SGLang's ServerArgs. Raises PatchError if SGLang is not installed."""
    srt = sglang_root() / "sglang/srt"
    return {name for place in PLACES for path in srt.glob(place) for name in _fields(path)}


def _fields(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id


def check_arguments(names: Iterable[str]) -> None:
    """Raises ConfigError with a problem for each name under `engine.args` that the installed SGLang does not take."""
    given = list(names)
    known = known_arguments() if given else set()
    problems = [_problem(name, known) for name in given if name not in known]
    if problems:
        raise ConfigError(problems)


def _problem(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    meant = f"; did you mean {' or '.join(near)}?" if near else "; `python -m sglang.launch_server --help` lists them"
    return f"engine.args.{name}: the installed SGLang has no such argument{meant}"
