"""A unit to write, a storage that fails at a chosen step, and what must hold whatever happened.

Run as a script it is a driver that is killed at every system call of a commit in turn (see test_writer.py).
"""

import copy
import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from hs_ray.manifest import clean_leftovers, list_markers, read_markers
from hs_ray.schema import CaptureSpec, ColumnStats, Marker, Sample, shard_metadata
from hs_ray.storage import Storage, open_storage
from hs_ray.writer import ShardWriter

SPEC = CaptureSpec(layers=(2, 4), final="pre_norm", num_hidden_layers=8, hidden_size=64)
FINGERPRINT = "f" * 64
TOKENS = 700  # 90 KB a column, three columns


def make_sample(number: int, tokens: int = TOKENS, spec: CaptureSpec = SPEC) -> tuple[Sample, list[np.ndarray]]:
    """A sample with states that depend on its number alone."""
    rng = np.random.default_rng(number)
    ids = rng.integers(0, 1000, tokens, dtype=np.int32)
    sample = Sample(f"s{number}", "train.jsonl", number, ids, np.ones(tokens, np.uint8))
    shape = (len(spec.columns), tokens, spec.hidden_size)
    return sample, list(rng.integers(0, 2**16, shape, dtype=np.uint16))


def stats_of(states: list[np.ndarray]) -> list[ColumnStats]:
    return [ColumnStats(rows=len(state), absmax=float(index)) for index, state in enumerate(states)]


def make_writer(storage: Storage, unit: int, attempt: str, epoch: int = 1, **changes: Any) -> ShardWriter:
    spec = changes.pop("spec", SPEC)
    compression = changes.pop("compression", "none")
    metadata = shard_metadata(
        spec, model="tiny", revision=None, fingerprint=FINGERPRINT, compression=compression, versions={}
    )
    settings = {"min_free_bytes": 0, "on_wait": None} | changes
    return ShardWriter(storage, unit, attempt, epoch, spec, compression, metadata, FINGERPRINT, **settings)


def attempt(storage: Storage, unit: int, name: str, epoch: int = 1, samples: int = 2) -> Marker:
    """One attempt as an actor makes it: write, commit, and discard on any exception."""
    writer = make_writer(storage, unit, name, epoch)
    try:
        for number in range(samples):
            sample, states = make_sample(number)
            writer.add(sample, states, stats_of(states))
        sample, _ = make_sample(99)
        writer.fail(sample, "nan", "not a number")
        return writer.commit("engine 0", 1.5)
    except BaseException:
        writer.discard()
        raise


def check_nothing_partial(storage: Storage) -> None:
    """Every file under a final name is whole; every marker names a shard that is exactly what it says."""
    for info in storage.list("shards"):
        file = pq.ParquetFile(io.BytesIO(storage.read_bytes(info.path)))
        assert file.metadata.num_rows == file.metadata.num_row_groups == 2
    for unit, marker in list_markers(storage).items():
        assert marker is not None and marker.unit == unit and marker.shard is not None
        data = storage.read_bytes(marker.shard)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (marker.bytes, marker.sha256)
        assert (marker.samples, marker.tokens, len(marker.failed)) == (2, 2 * TOKENS, 1)


def finish(storage: Storage, unit: int, epoch: int) -> None:
    """A resume: clear up, run the unit if it has no marker. Then there is one marker, one shard and nothing else."""
    markers = read_markers(storage, FINGERPRINT)
    clean_leftovers(storage, epoch, markers)
    check_nothing_partial(storage)
    if unit not in markers:
        attempt(storage, unit, f"{epoch:04d}-00000002", epoch)
    markers = read_markers(storage, FINGERPRINT)
    clean_leftovers(storage, epoch, markers)
    check_nothing_partial(storage)
    assert list(markers) == [unit]
    assert [info.path for info in storage.list("shards")] == [markers[unit].shard]
    assert storage.list("_run/tmp") == []


def subfolder(storage: Storage, name: str) -> Storage:
    """An output of its own over the same connection: making one takes a third of a second."""
    if storage.is_local:
        return open_storage(f"{storage.root}/{name}")
    other: Any = copy.copy(storage)
    other.root, other._prefix = f"{storage.root}/{name}", f"{other._prefix}/{name}"
    return other


class Injected(Exception):
    pass


class FaultyStorage:
    """Passes everything on to a storage, and raises before or after the step-th call of one of its methods."""

    def __init__(self, storage: Storage, step: int, when: str):
        self._storage, self._step, self._when, self.calls = storage, step, when, []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            now = len(self.calls) == self._step
            if now and self._when == "before":
                raise Injected(name)
            result = value(*args, **kwargs)
            if now:
                raise Injected(name)
            return result

        return call


SYSTEM_CALLS = ("open", "fsync", "rename", "link", "unlink", "ftruncate", "mkdir", "close")


def count_calls(act: Callable[[int], None]) -> Iterator[int]:
    """Replace the system calls by ones that first call `act(n)`; for n = 1, 2, ..."""
    number = 0

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            number += 1
            act(number)
            return original(*args, **kwargs)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, wrap(getattr(os, name)))
    yield number


def kill_at_every_call(folder: Path) -> int:
    """Commit in a child that kills itself at its first, second, ... system call; check and resume after each."""
    for step in range(1, 1000):
        root = folder / str(step)
        pid = os.fork()
        if pid == 0:
            next(count_calls(lambda number, step=step: os.kill(os.getpid(), 9) if number == step else None))
            attempt(open_storage(str(root)), 7, "0001-00000001")
            os._exit(0)
        killed = os.waitpid(pid, 0)[1] != 0
        storage = open_storage(str(root))
        check_nothing_partial(storage)
        finish(storage, 7, epoch=2)
        if not killed:
            return step - 1
    raise AssertionError("the commit never came to its end")


if __name__ == "__main__":
    print(kill_at_every_call(Path(sys.argv[1])))
