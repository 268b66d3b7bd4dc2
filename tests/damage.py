"""A made output to damage, and what verify says of it."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_output import MadeOutput

from hs_ray.storage import open_storage
from hs_ray.verify import verify_integrity


def copied(made: MadeOutput, path: Path) -> MadeOutput:
    """A copy that a test may damage."""
    return dataclasses.replace(made, path=Path(shutil.copytree(made.path, path)))


def found(made: MadeOutput, **options: Any) -> dict[str, list[str]]:
    """Problems of the integrity check: file and text by check."""
    problems: dict[str, list[str]] = {}
    for problem in verify_integrity(open_storage(str(made.path)), **options).problems:
        problems.setdefault(problem.check, []).append(f"{problem.file}: {problem.detail}")
    return problems


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """`change` alters what is in the file, or returns another content."""
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


def flip_bit(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
