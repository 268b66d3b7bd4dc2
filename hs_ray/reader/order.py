"""Which sample comes when: the order of an epoch, each rank's share of it, and where a pass through it stands."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from hs_ray.errors import ConfigError

LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
EPOCH, POSITION, PASS, WORKERS, BATCH, SEEN = range(6)  # places in the shared memory of a Place
MAX_WORKERS = 4096
SHARDS = "shards"  # key of a state: the digest of their layout, which earlier releases did not note
Order = TypeVar("Order", np.ndarray, range)  # of sample numbers


def epoch_order(first: np.ndarray, seed: int, epoch: int, window: int) -> np.ndarray:
    """Sample numbers of a shuffled epoch, over all ranks: shards shuffled, then samples within `window` shards.

    first: the first sample of each shard, and behind the last one the number of samples.
    """
    random = np.random.default_rng([seed, epoch])
    shards = random.permutation(len(first) - 1)
    parts = [np.arange(0)]
    for at in range(0, len(shards), window):
        group = [np.arange(first[i], first[i + 1]) for i in shards[at : at + window]]
        parts.append(random.permutation(np.concatenate(group)))
    return np.concatenate(parts)


def share(order: Order, rank: int, world_size: int, even: bool) -> Order:
    """A rank's share of an order, dealt out one by one. even: the last samples are dropped."""
    if even:
        order = order[: len(order) - len(order) % world_size]
    return order[rank::world_size]


def layout_digest(shards: Iterable[tuple[int, int]]) -> str:
    """sha256 of (unit, samples) of each shard: the same samples in other shards are shuffled into another order."""
    return hashlib.sha256(json.dumps(list(shards)).encode()).hexdigest()


def differences(state: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """What of the order's identity is another in a state."""
    told = {SHARDS: identity[SHARDS], **state}
    return [
        f"{name} = {told.get(name)!r} in the state, {value!r} here"
        for name, value in identity.items()
        if told.get(name) != value
    ]


class Place:
    """Where a dataset stands, in shared memory: living workers see what the training process sets, and it sees them.

    position: samples of the epoch that all ranks together had had when the latest pass began.
    workers: DataLoader workers of the latest pass; 0 if this process makes it itself, or none has begun.
    batch: samples of the largest batch that a worker put together since `move`; 0 if that is not known.
    """

    def __init__(self) -> None:
        self._shared = torch.zeros(SEEN + MAX_WORKERS, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._shared[EPOCH])

    @property
    def position(self) -> int:
        return int(self._shared[POSITION])

    @property
    def begun(self) -> bool:
        """A pass has begun since `move`."""
        return bool(self._shared[PASS])

    @property
    def workers(self) -> int:
        return int(self._shared[WORKERS])

    @property
    def batch(self) -> int:
        return int(self._shared[BATCH])

    def move(self, epoch: int, position: int) -> None:
        """The next pass, and no other, begins at `position`."""
        self._shared.zero_()
        self._shared[EPOCH], self._shared[POSITION] = epoch, position

    def begin(self, worker: Any) -> int:
        """A pass begins in this process, `worker` is its WorkerInfo, if any: the position that it begins at.

        The workers of one pass decide this each for itself, and all in the same way: it is the first one since
        `move` if it has their seed and their number and none of them has begun before.
        """
        shared = self._shared
        number, workers, seed = (0, 0, -1) if worker is None else (worker.id, worker.num_workers, worker.seed)
        if number >= MAX_WORKERS:
            raise ConfigError(f"num_workers = {workers}: at most {MAX_WORKERS}")
        key = hash((seed - number, workers))
        if not shared[PASS]:
            shared[PASS] = key
        first = int(shared[PASS]) == key and not shared[SEEN + number]
        if first:
            shared[SEEN + number] = 1
        else:
            shared[POSITION] = 0
        shared[WORKERS] = workers
        return self.position if first else 0

    def saw_batch(self, samples: int) -> None:
        self._shared[BATCH] = max(self.batch, samples)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A spawned worker gets the shared memory itself, a pickled or deep copy its own, which must be shared too."""
        self._shared = state["_shared"].share_memory_()  # shared already: nothing is done


def check_consumed(consumed: int | None, mine: int, batch_size: int | None, place: Place) -> int:
    """`consumed`, if it says exactly which samples a rank has had of the `mine` in its pass. Raises ConfigError."""
    size = batch_size or place.batch or 1
    if consumed is None:
        raise ConfigError(
            "consumed = None: DataLoader workers read ahead; give state_dict(consumed=...) the samples that this rank "
            "has had since the pass began: batches taken * batch_size"
        )
    if not 0 <= consumed < mine + size:  # the last batch may be a short one
        raise ConfigError(
            f"consumed = {consumed}: this rank has {mine} samples in this pass; count from its beginning, not over "
            "passes"
        )
    if place.workers < 2 or consumed >= mine:  # the order does not depend on batches
        return consumed
    if batch_size is None or place.batch not in (0, batch_size):
        raise ConfigError(
            f"batch_size = {batch_size}: with several workers the place in the epoch depends on it; give "
            f"HiddenStatesDataset(batch_size={place.batch or '...'}), the DataLoader's, 1 if it makes no batches"
        )
    if consumed % batch_size:
        raise ConfigError(f"consumed = {consumed}: whole batches, a multiple of batch_size = {batch_size}")
    return consumed


def refuse_in_worker(method: str) -> None:
    """A worker knows its own part of the epoch alone. Raises ConfigError."""
    if get_worker_info() is not None:
        raise ConfigError(
            f"{method}() in a DataLoader worker (torchdata's StatefulDataLoader calls it there): call "
            "state_dict(consumed=...) and load_state_dict() in the training process, with torch's DataLoader; or "
            "num_workers=0"
        )


def ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """As given, or those of torch.distributed. Raises ConfigError for one without the other, out of range, and where
    they have to be given."""
    if rank is None and world_size is None:
        _refuse_beside_accelerate()
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(f"rank = {rank}, world_size = {world_size}: give both, with 0 <= rank < world_size")
    return rank, world_size


def _refuse_beside_accelerate() -> None:
    """accelerate, and with it Trainer, shares the batches of a loader over its processes: of a share that was taken
    here, most samples would never be trained. Raises ConfigError where it runs several.

    It is not imported for that: whoever uses it has done so.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    processes = getattr(state, "_shared_state", {}).get("num_processes", 1)  # to ask the class itself would begin one
    if processes > 1:
        raise ConfigError(
            f"rank = None, world_size = None: accelerate runs {processes} processes, and what it prepares it shares "
            "over them itself; give rank=0, world_size=1 where it prepares the loader (Trainer does; with map_style() "
            "too), this process's own rank and world_size where it does not"
        )


def check_ranks_of_a_node(path: str, world_size: int, even: bool) -> None:
    """Ranks of several nodes cannot share out what is on one. Raises ConfigError."""
    here = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), None)
    if world_size > 1 and str(world_size) != here:
        raise ConfigError(
            f"{path}: world_size = {world_size}, and its shards are on each node's own disk; give rank and world_size "
            f"of this node's processes (LOCAL_RANK, LOCAL_WORLD_SIZE, which is {here or 'not set'})"
        )
    if even:
        raise ConfigError(
            f"{path}: even = True, and its shards are on each node's own disk: nodes have different numbers of "
            "samples; copy the shards into one place, or stop at the shortest"
        )
