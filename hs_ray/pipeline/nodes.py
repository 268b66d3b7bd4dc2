"""The disks of the cluster's nodes: a folder that all of them see, or one on each (`output.node_path`)."""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hs_ray.errors import ConfigError, HsRayError, OutputError, RunError
from hs_ray.schema import TMP, Marker
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
    blind = [_alive().get(node, node) for node, seen in answers.items() if not seen]
    if blind:
        raise ConfigError(
            f"output.path = {storage.root}: {len(blind)} of {len(answers)} nodes of the Ray cluster do not see what "
            f"this one writes there ({', '.join(blind[:3])}); use s3://bucket/prefix, a folder on a file system "
            "that every node mounts (the shards alone may be on each node's own disk: output.node_path), or one node "
            "(cluster.address=local)"
        )


class NodeDisks:
    """`storage.per_node.Disks`: a call asks every node that is alive."""

    def __init__(self, storage: PerNodeStorage):
        self._node = PerNodeStorage(storage.shared, storage.node_path)
        self.folder = self._node.folder  # made up now, once for all nodes
        self._places: dict[str, set[str]] = {}  # nodes that a file was listed on

    def list(self, folder: str) -> Sequence[FileInfo]:
        listed = []
        for node, found in _on_every_node(_list, self._node, folder).items():
            for info in found:
                self._places.setdefault(info.path, set()).add(node)
                listed.append(info)
        return listed

    def remove(self, path: str) -> None:
        if places := self._places.pop(path, None):  # else it was never on a disk
            _on_every_node(_remove, self._node, path, only=places)

    def free_bytes(self) -> int:
        """Of all disks together; nodes that share one (by its device and host) count it once."""
        return sum(dict(_on_every_node(_free, self._node).values()).values())

    def names(self) -> set[str]:
        """Of the folders that are there."""
        return {name for name in _on_every_node(_name, self._node).values() if name}

    def check_writable(self) -> None:
        """Raises OutputError that names a node whose folder cannot be written; nodes without an engine need none."""
        gpus = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")}
        for node, reason in _on_every_node(_try_to_write, self._node, only=gpus or None).items():
            if reason:
                raise OutputError(
                    f"output.node_path = {self._node.node_path}: node {_alive().get(node, node)}: {reason}"
                )


def see_every_disk(storage: Storage, check: bool = False) -> None:
    """From here on the driver sees the shards of all nodes, if they are on each node's own disk.

    Call it when Ray is there, and again after Ray's end. check: raise OutputError where a node's folder cannot be
    written.
    """
    if isinstance(storage, PerNodeStorage):
        disks = NodeDisks(storage)
        if check:
            disks.check_writable()
        storage.disks = disks


def check_nothing_is_away(storage: Storage, redo: bool, started: bool, lost: Sequence[Marker]) -> None:
    """Raises OutputError if shards of these markers, which were not found, are on disks that are not there.

    redo: `output.redo_lost`, their units may be done again; but by the next start, if this one has `started`
    (RunError): a node that went meanwhile may be back by then.
    """
    if not isinstance(storage, PerNodeStorage) or not isinstance(storage.disks, NodeDisks):
        return
    names = storage.disks.names()  # after the listing that did not find them: a node that has gone since is away
    away = Counter(marker.node for marker in lost if marker.shard is not None and marker.node not in names)
    if not away or (redo and not started):
        return
    where = ", ".join(f"{node or 'output.path'} ({count:,} shards)" for node, count in away.most_common(5))
    what = f"output.node_path = {storage.node_path}: committed shards are on disks that are not there: {where}"
    if redo:
        raise RunError(f"{what}; run the same command again: it does those units anew (output.redo_lost)")
    raise OutputError(
        f"{what}; start their nodes (each folder has its name in _run/node), or give output.redo_lost=true to do those "
        "units again"
    )


def _alive() -> dict[str, str]:
    """Address by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _on_every_node(function: Callable[..., Any], *args: Any, only: set[str] | None = None) -> dict[str, Any]:
    """Its answer by node id; without those that end meanwhile.

    Raises what the function raises, and RunError, with the node, for one that does not answer.
    """
    alive = {node: address for node, address in _alive().items() if only is None or node in only}
    calls = {
        node: _call.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(function, args)
        for node in alive
    }
    answers = {}
    for node, call in calls.items():
        try:
            answers[node] = ray.get(call, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            if node not in _alive():
                continue
            cause = getattr(error, "cause", None)
            if isinstance(cause, HsRayError):
                raise cause from None
            raise RunError(
                f"node {alive[node]}: {cause or type(error).__name__}; run the same command again"
            ) from error
    return answers


@ray.remote(num_cpus=0)
def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _sees(path: str) -> bool:
    return Path(path).is_file()


def _list(storage: PerNodeStorage, folder: str) -> Sequence[FileInfo]:
    return storage.visible.list(folder) if storage.visible else []


def _remove(storage: PerNodeStorage, path: str) -> None:
    if storage.visible:
        storage.visible.remove(path)


def _name(storage: PerNodeStorage) -> str | None:
    return storage.disk_name()


def _free(storage: PerNodeStorage) -> tuple[tuple[str, int], int]:
    if storage.visible is None:
        return ("", 0), 0
    folder = Path(storage.visible.root)
    while not folder.exists():
        folder = folder.parent
    return (os.uname().nodename, folder.stat().st_dev), storage.visible.free_bytes() or 0


def _try_to_write(storage: PerNodeStorage) -> str | None:
    try:
        storage.disk.check_writable()
    except OutputError as error:
        return str(error).removeprefix("output.path = ")
    return None
