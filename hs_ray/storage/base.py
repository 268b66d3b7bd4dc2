"""The interface of an output, and what its two kinds share.

Paths are relative to the output's root and use `/`. A file under a final name is complete: local files are
written beside, fsynced and renamed (or linked, where they must not replace another); S3 objects appear whole.
`create` is the one primitive that decides races: of any number of callers, exactly one gets True.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hs_ray.errors import OutputError
from hs_ray.schema import TMP
from hs_ray.storage.scratch import Scratch


@dataclass(frozen=True)
class FileInfo:
    path: str  # relative to the root
    size: int  # bytes
    mtime: float  # unix time by the clock of the store


class Storage(ABC):
    """An output. Picklable, safe for several threads."""

    root: str
    is_local: bool

    @property
    def node(self) -> str:
        """Whose disk a shard published here is on; empty where all nodes see it."""
        return ""

    def holds(self, node: str) -> bool:
        """Whether shards whose marker names this node (or none) are seen from here."""
        return True

    def local_path(self, path: str) -> str | None:
        """The file's name for the operating system; None for what is not on a local or mounted disk."""
        return None

    @abstractmethod
    def list(self, folder: str, prefix: str = "") -> Sequence[FileInfo]:
        """Files right under `folder` whose names start with `prefix`, by path; [] if there is no such folder."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def read_bytes(self, path: str) -> bytes:
        """Raises FileNotFoundError."""

    @abstractmethod
    def read_many(self, paths: Sequence[str]) -> Sequence[bytes]:
        """Many small files, read concurrently."""

    @abstractmethod
    def open(self, path: str) -> pa.NativeFile:
        """Random access by range reads, for `pq.ParquetFile`. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Create or replace, durably and atomically."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Create durably, unless it exists (then False). `data` must name its writer: equal data means our own
        earlier try, whose answer was lost on the way."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """A file that is not there is no error."""

    @abstractmethod
    def scratch(self, name: str) -> Scratch:
        """A new local file to make a shard in; `name` is unique to the attempt."""

    @abstractmethod
    def publish(self, scratch: Scratch, path: str) -> None:
        """Make a finished scratch file durable under its final name, whole or not at all."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Room for the output; None where there is no bound (S3)."""

    def scratch_room(self) -> tuple[str, int] | None:
        """(folder, free bytes) where shards are made that are moved elsewhere once they are whole; None: in place."""
        return None

    def abort_incomplete_uploads(self) -> int:
        """Free what unfinished uploads of dead attempts hold on S3. Returns how many there were."""
        return 0

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
            return True
        except FileNotFoundError:
            return False

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return self.read_bytes(path) == data
        except FileNotFoundError:
            return False

    def now(self) -> float:
        """Unix time by the clock that also stamps `FileInfo.mtime`: clocks of several hosts are never compared."""
        probe = f"{TMP}/clock-{uuid.uuid4().hex}"
        self.write(probe, b"")
        try:
            return next(info.mtime for info in self.list(TMP, Path(probe).name))
        finally:
            self.remove(probe)

    def check_writable(self) -> None:
        """Raises OutputError, with path and reason, unless everything that a commit needs works here."""
        probe = f"{TMP}/probe-{uuid.uuid4().hex}"
        step = "write"
        try:
            first = self.create(probe, b"first")
            second = self.create(probe, b"second")
            step = "list"
            listed = [info.size for info in self.list(TMP, Path(probe).name)]
            step = "read"
            content = self.read_bytes(probe)
            step = "remove"
            self.remove(probe)
        except (OSError, OutputError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise OutputError(f"output.path = {self.root}: cannot {step} there: {reason}") from error
        if not first or second or listed != [5] or content != b"first":
            raise OutputError(
                f"output.path = {self.root}: this store lets two writers create one file (it ignores "
                f"If-None-Match), so a commit could be lost; use a local disk or another S3 server"
            )
