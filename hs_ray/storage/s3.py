"""An output on S3."""

import io
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from hs_ray.errors import ConfigError
from hs_ray.storage.base import FileInfo, Storage
from hs_ray.storage.s3_client import S3Client
from hs_ray.storage.scratch import Scratch

OURS = ("shards", "_run", "_rejects")


class S3Storage(Storage):
    is_local = False

    def __init__(self, url: str, options: Mapping[str, Any]):
        self.root = url.rstrip("/")
        bucket, _, self._prefix = self.root.partition("://")[2].partition("/")
        self._scratch_dir = options.get("scratch_dir")
        self._client = S3Client(bucket, options)

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def list(self, folder: str, prefix: str = "") -> Sequence[FileInfo]:
        cut = len(self._key(""))
        found = self._client.list_prefix(self._key(f"{folder}/{prefix}" if folder else prefix))
        return [FileInfo(key[cut:], size, mtime) for key, size, mtime in found if not key.endswith("/")]

    def size(self, path: str) -> int:
        return self._client.size(self._key(path))

    def read_bytes(self, path: str) -> bytes:
        return self._client.get(self._key(path))

    def read_many(self, paths: Sequence[str]) -> Sequence[bytes]:
        return self._client.get_many([self._key(path) for path in paths])

    def open(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_RangeFile(self._client, self._key(path)), mode="r")

    def write(self, path: str, data: bytes) -> None:
        self._client.put(self._key(path), data)

    def create(self, path: str, data: bytes) -> bool:
        return self._client.create(self._key(path), data)

    def remove(self, path: str) -> None:
        self._client.delete(self._key(path))

    def scratch(self, name: str) -> Scratch:
        """Without a name in the file system, so that nothing is left even after kill -9."""
        folder = self._scratch_folder
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # a file system without O_TMPFILE
            fd, path = tempfile.mkstemp(prefix="hs_ray-", suffix=".parquet", dir=folder)
            Path(path).unlink()
        return Scratch(f"/proc/self/fd/{fd}", fd, linked=False, disk=f"{folder} (buffer for uploads)")

    @property
    def _scratch_folder(self) -> str:
        return self._scratch_dir or tempfile.gettempdir()

    def scratch_room(self) -> tuple[str, int]:
        folder = self._scratch_folder
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"output.storage_options.scratch_dir = {folder}: no folder that node {socket.gethostname()} may write "
                "to; make it there, or choose one that every node has"
            )
        return folder, shutil.disk_usage(folder).free

    def publish(self, scratch: Scratch, path: str) -> None:
        self._client.upload(scratch.fd, scratch.size, self._key(path))

    def free_bytes(self) -> int | None:
        return None

    def abort_incomplete_uploads(self) -> int:
        # Not all below the prefix: another output, or another's files, may be there and in the making.
        return sum(self._client.abort_uploads(self._key(f"{folder}/")) for folder in OURS)

    def check_writable(self) -> None:
        # What is at a wrong endpoint may answer, with errors that look transient: not ten minutes of them.
        patient = self._client
        self._client = S3Client(patient.bucket, patient.options | {"retry_seconds": min(patient.retry_seconds, 20.0)})
        try:
            super().check_writable()
            patient.answered.set()
        finally:
            self._client = patient


class _RangeFile(io.RawIOBase):
    """An S3 object as a seekable file; every read is one range request (a long one, several at once)."""

    def __init__(self, client: S3Client, key: str):
        self._client, self._key, self._at = client, key, 0
        self._size = client.size(key)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        data = self._client.get_range(self._key, self._at, length) if length else b""
        self._at += length
        return data
