"""An output on a local (or network) file system."""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from hs_ray.schema import TMP
from hs_ray.storage.base import FileInfo, Storage
from hs_ray.storage.scratch import Scratch


class LocalStorage(Storage):
    is_local = True

    def __init__(self, root: str):
        self._root = Path(root).expanduser().absolute()
        self.root = str(self._root)

    def local_path(self, path: str) -> str | None:
        return str(self._root / path)

    def list(self, folder: str, prefix: str = "") -> Sequence[FileInfo]:
        found = []
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    # A file may go while we look: then it is not there.
                    with contextlib.suppress(FileNotFoundError):
                        if entry.name.startswith(prefix) and entry.is_file():
                            stat = entry.stat()
                            path = f"{folder}/{entry.name}" if folder else entry.name
                            found.append(FileInfo(path, stat.st_size, stat.st_mtime))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda info: info.path)

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def read_bytes(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def read_many(self, paths: Sequence[str]) -> Sequence[bytes]:
        with ThreadPoolExecutor(8) as pool:  # for network file systems; a local disk needs none
            return list(pool.map(self.read_bytes, paths))

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(str(self._root / path), "rb")

    @contextlib.contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        """The name of a temporary file with this content, fsynced; gone afterwards."""
        path = self._root / TMP / f"{uuid.uuid4().hex}.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def write(self, path: str, data: bytes) -> None:
        target = self._target(path)
        with self._written(data) as temporary:
            temporary.rename(target)
            sync_folder(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        target = self._target(path)
        with self._written(data) as temporary:
            try:
                target.hardlink_to(temporary)  # link(2): unlike rename(2) it never replaces
            except FileExistsError:
                return self._holds(path, data)  # a network file system may have linked it and lost the answer
            sync_folder(target.parent)
            return True

    def remove(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def scratch(self, name: str) -> Scratch:
        path = self._target(f"{TMP}/{name}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return Scratch(str(path), fd, linked=True, disk=self.root)

    def publish(self, scratch: Scratch, path: str) -> None:
        target = self._target(path)
        os.fsync(scratch.fd)
        if not _is_open_as(target, scratch.fd):  # it is, where an earlier call had no room to make the name durable
            Path(scratch.path).rename(target)
        sync_folder(target.parent)

    def free_bytes(self) -> int | None:
        folder = self._root
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _target(self, path: str) -> Path:
        target = self._root / path
        make_folder(target.parent)
        return target


def _is_open_as(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Like mkdir -p, and each new folder's own name is durable."""
    if not folder.is_dir():
        make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:  # another process was faster, or there is something else of that name
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        sync_folder(folder.parent)
