"""A folder that only one node sees is no output for engines on several."""

import secrets
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hs_ray.errors import ConfigError
from hs_ray.schema import TMP
from hs_ray.storage import Storage

ANSWER_S = 120.0  # a node may have to start a worker first


@ray.remote(num_cpus=0)
def _sees(path: str) -> bool:
    return Path(path).is_file()


def check_shared(storage: Storage) -> None:
    """Raises ConfigError if some node of the cluster does not see what this process writes to a local output."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    if not storage.is_local or len(alive) < 2:
        return
    probe = f"{TMP}/probe-{secrets.token_hex(8)}"
    storage.write(probe, b"seen from every node?")
    try:
        answers = ray.get([_ask(node["NodeID"], f"{storage.root}/{probe}") for node in alive], timeout=ANSWER_S)
    finally:
        storage.remove(probe)
    blind = [node["NodeManagerAddress"] for node, seen in zip(alive, answers, strict=True) if not seen]
    if blind:
        raise ConfigError(
            f"output.path = {storage.root}: {len(blind)} of {len(alive)} nodes of the Ray cluster do not see what "
            f"this one writes there ({', '.join(blind[:3])}); use s3://bucket/prefix, a folder on a file system "
            "that every node mounts, or one node (cluster.address=local)"
        )


def _ask(node: str, path: str) -> ray.ObjectRef:
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return _sees.options(scheduling_strategy=where).remote(path)
