"""Connect to a Ray cluster, or start one of this machine."""

import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import ray

from hs_ray.engine import janitor
from hs_ray.errors import ConfigError

PRIVATE = "hs_ray_private"  # resource of a cluster that lives as long as the job that started it
CONNECT_S = 10.0
MIN_CPUS = 4  # logical: reading, mapping and the board hold one each, also on a machine of two

_janitors: list[int] = []  # one for each cluster of ours, as Ray's own connection is one for the process


@dataclass(frozen=True)
class Cluster:
    gpus_by_node: tuple[int, ...]
    cpus: int

    @property
    def gpus(self) -> int:
        return sum(self.gpus_by_node)

    def engines(self, tp_size: int) -> int:
        """How many engines of `tp_size` GPUs find room; none spans two nodes."""
        return sum(gpus // tp_size for gpus in self.gpus_by_node)


def is_temporary(path: str) -> bool:
    """Whether a path lies in the folder that Ray made for a submitted job, and will remove."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and "://" not in path and not Path(path).is_absolute()


def connect(address: str) -> Cluster:
    """`auto`: a running cluster, else one of this machine; `local`: one of this machine; else that address.

    Raises ConfigError if the address does not answer.
    """
    set_environment()
    if not ray.is_initialized():
        try:
            _check_listens(address)
            # Ours is private: where another job's is up by now, `auto` would find that one.
            _start("local" if _janitors and address == "auto" else address)
        except ConnectionError as error:
            if address != "auto":
                raise ConfigError(
                    f"cluster.address = {address}: no Ray cluster answers there ({error}); "
                    "start one, or use cluster.address=local"
                ) from error
            _start("local")
        if address == "auto" and not _janitors and _resources().get(PRIVATE):
            _leave_private()
    found = _resources()
    gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return Cluster(tuple(gpus), int(found.get("CPU", 0)))


def _check_listens(address: str) -> None:
    """Raises ConnectionError where nothing does: Ray itself would ask again for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()
    return resources


def _leave_private() -> None:
    """Ray has found the cluster of another job on this machine, which will end with that job. Start our own.

    Raises ConfigError where the two would fight for GPUs.
    """
    gpus = int(_resources().get("GPU", 0))
    ray.shutdown()
    if gpus:
        raise ConfigError(
            f"cluster.address = auto: another hs_ray job runs on this machine, and this machine's {gpus} GPUs are its "
            "own; wait for it, or start a cluster for both (ray start --head) before them"
        )
    _start("local")


def set_environment() -> None:
    """What Ray reads from the environment, unless the user chose it; call before Ray is started or joined."""
    # Ray >= 2.59 turns on token authentication by itself in some ways of starting and not in others.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # On a machine without a GPU Ray would otherwise hide GPUs that it does not know of, with a warning a task.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The core worker reports, as an error, that our actor's arguments would be lost with the driver. So would the job.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")


def _start(address: str) -> None:
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _init(address)
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # ray.init has put its own in place, which leaves with code 15


def _init(address: str) -> None:
    common = {"logging_level": logging.WARNING, "log_to_driver": True}
    if address == "local":
        cpus = max(MIN_CPUS, os.cpu_count() or 1)
        _janitors.append(janitor.start())  # for what a kill of this process would leave of its own cluster
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, resources={PRIVATE: 1}, **common)
    elif address == "auto" and "RAY_ADDRESS" in os.environ:
        ray.init(**common)
    else:
        ray.init(address=address, **common)


def disconnect() -> None:
    ray.shutdown()
    while _janitors:
        janitor.stop(_janitors.pop())
