"""An output on a local (or network) file system."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from hs_ray.schema import TMP
from hs_ray.storage.base import FileInfo, Scratch, Storage


class LocalStorage(Storage):
    is_local = True

    def __init__(self, root: str):
        self.root = os.path.abspath(root)

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path)

    def list(self, folder: str, prefix: str = "") -> Sequence[FileInfo]:
        found = []
        try:
            with os.scandir(self._path(folder)) as entries:
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
        return os.stat(self._path(path)).st_size

    def read_bytes(self, path: str) -> bytes:
        with open(self._path(path), "rb") as file:
            return file.read()

    def read_many(self, paths: Sequence[str]) -> Sequence[bytes]:
        with ThreadPoolExecutor(8) as pool:  # for network file systems; a local disk needs none
            return list(pool.map(self.read_bytes, paths, chunksize=64))

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(self._path(path), "rb")

    @contextlib.contextmanager
    def _written(self, data: bytes) -> Iterator[str]:
        """The name of a temporary file with this content, fsynced; gone afterwards."""
        name = self._path(f"{TMP}/{uuid.uuid4().hex}.tmp")
        os.makedirs(os.path.dirname(name), exist_ok=True)
        try:
            with open(name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    def write(self, path: str, data: bytes) -> None:
        target = self._path(path)
        make_folder(os.path.dirname(target))
        with self._written(data) as name:
            os.rename(name, target)
            sync_folder(os.path.dirname(target))

    def create(self, path: str, data: bytes) -> bool:
        target = self._path(path)
        make_folder(os.path.dirname(target))
        with self._written(data) as name:
            try:
                os.link(name, target)  # unlike rename(2) it never replaces
            except FileExistsError:
                return self._holds(path, data)  # a network file system may have linked it and lost the answer
            sync_folder(os.path.dirname(target))
            return True

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(path))

    def scratch(self, name: str) -> Scratch:
        path = self._path(f"{TMP}/{name}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return Scratch(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), linked=True)

    def publish(self, scratch: Scratch, path: str) -> None:
        target = self._path(path)
        make_folder(os.path.dirname(target))
        os.fsync(scratch.fd)
        os.rename(scratch.path, target)
        sync_folder(os.path.dirname(target))

    def free_bytes(self) -> int | None:
        folder = self.root
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        return shutil.disk_usage(folder).free


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: str) -> None:
    """Like makedirs, and each new folder's own name is durable."""
    if not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        sync_folder(parent)
