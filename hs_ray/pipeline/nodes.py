"""The disks of the cluster's nodes: a folder that all of them see, or one on each (`output.node_path`)."""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hs_ray.errors import ConfigError, OutputError
from hs_ray.schema import TMP
from hs_ray.storage import FileInfo, PerNodeStorage, Storage

ANSWER_S = 120.0  # a node may have to start a worker first


def check_shared(storage: Storage) -> None:
    """Raises ConfigError if some node of the cluster does not see what this process writes to a local output."""
    if not storage.is_local or len(_alive()) < 2:
        return
    probe = f"{TMP}/probe-{secrets.token_hex(8)}"
    storage.write(probe, b"seen from every node?")
    try:
        answers = _on_every_node(_sees, f"{storage.root}/{probe}")
    finally:
        storage.remove(probe)
    blind = [address for address, seen in answers if not seen]
    if blind:
        raise ConfigError(
            f"output.path = {storage.root}: {len(blind)} of {len(answers)} nodes of the Ray cluster do not see what "
            f"this one writes there ({', '.join(blind[:3])}); use s3://bucket/prefix, a folder on a file system "
            "that every node mounts (the shards alone may be on each node's own disk: output.node_path), or one node "
            "(cluster.address=local)"
        )


class NodeDisks:
    """`storage.per_node.Disks`: every call asks every node that is alive. A node that is gone has no shards."""

    def __init__(self, storage: PerNodeStorage):
        self._node = PerNodeStorage(storage.shared, storage.node_path)

    def list(self, folder: str) -> Sequence[FileInfo]:
        return [info for _, found in _on_every_node(_list, self._node, folder) for info in found]

    def remove(self, path: str) -> None:
        _on_every_node(_remove, self._node, path)

    def free_bytes(self) -> int:
        """Of all disks together; nodes that share one (by its device and host) count it once."""
        return sum(dict(free for _, free in _on_every_node(_free, self._node)).values())

    def check_writable(self) -> None:
        """Raises OutputError that names a node whose folder cannot be written."""
        for address, reason in _on_every_node(_try_to_write, self._node):
            if reason:
                raise OutputError(f"output.node_path = {self._node.node_path}, node {address}: {reason}")


def see_every_disk(storage: Storage) -> None:
    """From here on the driver sees the shards of all nodes, if they are on each node's own disk; call it once
    Ray is there. Raises OutputError where a node's folder cannot be written."""
    if isinstance(storage, PerNodeStorage):
        disks = NodeDisks(storage)
        disks.check_writable()
        storage.disks = disks


def _alive() -> dict[str, str]:
    """Address by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _on_every_node(function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
    """(address, answer) of every node; without those that end meanwhile. Raises what the function raises."""
    remote = ray.remote(num_cpus=0)(function)
    alive = _alive()
    calls = {
        node: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*args)
        for node in alive
    }
    answers = []
    for node, call in calls.items():
        try:
            answers.append((alive[node], ray.get(call, timeout=ANSWER_S)))
        except ray.exceptions.RayError:
            if node in _alive():
                raise
    return answers


def _sees(path: str) -> bool:
    return Path(path).is_file()


def _list(storage: PerNodeStorage, folder: str) -> Sequence[FileInfo]:
    return storage.disk.list(folder)


def _remove(storage: PerNodeStorage, path: str) -> None:
    storage.disk.remove(path)


def _free(storage: PerNodeStorage) -> tuple[tuple[str, int], int]:
    folder = Path(storage.disk.root)
    while not folder.exists():
        folder = folder.parent
    return (os.uname().nodename, folder.stat().st_dev), storage.disk.free_bytes() or 0


def _try_to_write(storage: PerNodeStorage) -> str | None:
    try:
        storage.disk.check_writable()
    except OutputError as error:
        return str(error)
    return None
