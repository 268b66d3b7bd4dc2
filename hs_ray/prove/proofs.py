"""Which model classes are proven: engine/proofs.json comes with hs_ray, others are in the user's cache.

A proof holds for a class, an SGLang release, a device kind and one or several GPUs an engine, and only as long as
the class is captured the way it was then: its entry of engine/models.py is part of the proof.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hs_ray.builtin_models import cache_folder
from hs_ray.engine.models import entry_for
from hs_ray.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "engine" / "proofs.json"


@dataclass(frozen=True, order=True)
class Key:
    """What a proof is of."""

    architecture: str  # config.json architectures[0]
    release: str  # of SGLang
    device: str  # cpu or cuda
    parallel: bool  # tp_size > 1

    def __str__(self) -> str:
        return f"{self.architecture} on SGLang {self.release}, {self.device}{', tp_size > 1' if self.parallel else ''}"

    @property
    def slug(self) -> str:
        return f"{self.architecture}-{self.release}-{self.device}{'-tp' if self.parallel else ''}"


@dataclass(frozen=True)
class Proof:
    """What was measured. `errors` and `bf16_errors`: column -> root mean square over tokens of the relative error."""

    architecture: str
    release: str
    device: str
    parallel: bool
    how: str  # the entry then in force
    ok: bool
    errors: dict[str, float]
    bf16_errors: dict[str, float]
    worst_token: float
    table: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> Key:
        return Key(self.architecture, self.release, self.device, self.parallel)

    @property
    def in_force(self) -> bool:
        """It passed, and the class is still captured the way it was."""
        entry = entry_for(self.architecture, self.release)
        return self.ok and entry is not None and self.how == str(entry)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Proof":
        return cls(**data)


def read_proofs(path: Path = SHIPPED) -> list[Proof]:
    """All proofs of a file, in the order of their keys; none if there is no file."""
    if not path.is_file():
        return []
    return sorted((Proof.from_dict(data) for data in json.loads(path.read_text())), key=lambda proof: proof.key)


def add_proofs(path: Path, proofs: list[Proof]) -> None:
    """Put proofs in a file; a newer one replaces that of the same key. Atomic."""
    found = {proof.key: proof for proof in [*read_proofs(path), *proofs]}
    text = json.dumps([found[key].to_dict() for key in sorted(found)], indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    Path(name).chmod(0o644)
    Path(name).replace(path)


def cached_path(key: Key) -> Path:
    return cache_folder() / "proofs" / f"{key.slug}.json"


def find_proof(key: Key) -> Proof | None:
    """The proof in force for a key, shipped or cached."""
    for path in (SHIPPED, cached_path(key)):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged cache file is no proof
            for proof in read_proofs(path):
                if proof.key == key and proof.in_force:
                    return proof
    return None


@contextlib.contextmanager
def lock(key: Key) -> Iterator[None]:
    """Only one process of a machine proves a key; the others wait and find its proof. Raises ConfigError."""
    path = cached_path(key).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"HS_RAY_CACHE = {path.parent.parent}: cannot be written ({error.strerror}); set it to a folder of yours"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however it ends
        yield
