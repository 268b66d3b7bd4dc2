"""Shards on each node's own disk, everything else in an output that all nodes see (`output.node_path`).

An output has a folder of its own on each disk, and each of these folders a name that it keeps: markers say by it where
a shard is, whatever the node is called after its next start. A shard has the same path in every layout, and its
name is unique: copied into the output's own `shards/` it is found there.
"""

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import pyarrow as pa

from hs_ray.errors import OutputError
from hs_ray.schema import SHARDS, TMP
from hs_ray.storage.base import FileInfo, Storage
from hs_ray.storage.local import LocalStorage
from hs_ray.storage.scratch import Scratch

NAME = "_run/node"  # on a disk: the name of the folder it is in
FOLDER = "_run/folder"  # in the output: what its folder on each disk is called


class Disks(Protocol):
    """The disks of all nodes, as the driver reaches them."""

    def list(self, folder: str) -> Sequence[FileInfo]: ...

    def remove(self, path: str) -> None: ...

    def free_bytes(self) -> int: ...


class PerNodeStorage(Storage):
    """`shared`, but shards, and the scratch files they are made in, are under `node_path` on this node's own disk.

    node_path: absolute; variables such as `$SCRATCH` are those of each node. disks: on the driver, what reaches every
    node; elsewhere None, and only this node's shards are seen. Raises OutputError for a path that is not absolute.
    """

    def __init__(self, shared: Storage, node_path: str, disks: Disks | None = None):
        self.shared, self.node_path, self.disks = shared, node_path, disks
        self.root, self.is_local = shared.root, shared.is_local
        self._folder: str | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"disks": None}

    @property
    def folder(self) -> str:
        """Below `node_path`, of this output alone, however its path is spelled: it must not see another's shards.

        Made up once, and kept in the output.
        """
        while self._folder is None:
            try:
                self._folder = self.shared.read_bytes(FOLDER).decode()
            except FileNotFoundError:
                name = f"{PurePosixPath(self.root).name}-{secrets.token_hex(4)}"
                self.shared.create(FOLDER, name.encode())
        return self._folder

    def _path(self) -> str:
        """`node_path` on this node; asked for each time, since the storage travels between nodes."""
        path = os.path.expandvars(self.node_path)
        if "$" in path or not Path(path).is_absolute():
            raise OutputError(
                f"output.node_path = {self.node_path}: is {path} on {socket.gethostname()}; an absolute path, whose "
                "variables are set on every node"
            )
        return path

    @property
    def disk(self) -> LocalStorage:
        """This node's."""
        return LocalStorage(f"{self._path()}/{self.folder}")

    @property
    def visible(self) -> LocalStorage | None:
        """`disk`, for looking: None on a machine without such a path, as where a trainer or a head may be."""
        try:
            self._path()  # first: it asks no store, and this is called for every marker
        except OutputError:
            return None
        return self.disk if self._folder or self.shared.exists(FOLDER) else None

    def disk_name(self) -> str | None:
        """Of this node's folder; None where it has none yet."""
        disk = self.visible
        try:
            return disk.read_bytes(NAME).decode() if disk else None
        except FileNotFoundError:
            return None

    @property
    def node(self) -> str:
        while (name := self.disk_name()) is None:
            self.disk.create(NAME, f"{socket.gethostname()}-{secrets.token_hex(4)}".encode())
        return name

    def holds(self, node: str) -> bool:
        return not node or self.disks is not None or node == self.disk_name()

    def local_path(self, path: str) -> str | None:
        return self._place(path).local_path(path)

    def _place(self, path: str) -> Storage:
        """Where a file is, or would be: a shard may have been copied into the output's own folder."""
        if not _lies_in(path, SHARDS):
            return self.shared
        disk = self.visible
        return disk if disk and (disk.exists(path) or not self.shared.exists(path)) else self.shared

    def list(self, folder: str, prefix: str = "") -> Sequence[FileInfo]:
        found = {info.path: info for info in self.shared.list(folder, prefix)}
        disk = self.disks or self.visible
        if disk and folder in (SHARDS, TMP):
            for info in disk.list(folder):
                if PurePosixPath(info.path).name.startswith(prefix):
                    found[info.path] = info  # before a copy of it, which may be half done
        return [found[path] for path in sorted(found)]

    def size(self, path: str) -> int:
        return self._place(path).size(path)

    def read_bytes(self, path: str) -> bytes:
        return self._place(path).read_bytes(path)

    def read_many(self, paths: Sequence[str]) -> Sequence[bytes]:
        return self.shared.read_many(paths)

    def open(self, path: str) -> pa.NativeFile:
        return self._place(path).open(path)

    def write(self, path: str, data: bytes) -> None:
        self.shared.write(path, data)

    def create(self, path: str, data: bytes) -> bool:
        return self.shared.create(path, data)

    def remove(self, path: str) -> None:
        self.shared.remove(path)
        disk = self.disks or self.visible
        if disk and _lies_in(path, SHARDS, TMP):
            disk.remove(path)

    def scratch(self, name: str) -> Scratch:
        # Where it will be published: a shard is called after its unit, the plan's files are not.
        return (self.disk if name.startswith("unit-") else self.shared).scratch(name)

    def publish(self, scratch: Scratch, path: str) -> None:
        (self.disk if _lies_in(path, SHARDS) else self.shared).publish(scratch, path)

    def free_bytes(self) -> int | None:
        return self.disks.free_bytes() if self.disks else None

    def abort_incomplete_uploads(self) -> int:
        return self.shared.abort_incomplete_uploads()

    def now(self) -> float:
        return self.shared.now()

    def check_writable(self) -> None:
        self.shared.check_writable()


def _lies_in(path: str, *folders: str) -> bool:
    return path.rpartition("/")[0] in folders
