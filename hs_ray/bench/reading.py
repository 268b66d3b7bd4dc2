"""How fast an output is read: the reader, with and without workers, against a plain read of the same files."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from hs_ray.config import BenchJob
from hs_ray.reader import HiddenStatesDataset
from hs_ray.reader.run import find_shards, load_run
from hs_ray.schema import SHARDS
from hs_ray.storage import Storage, open_storage

WORKERS = (0, 2, 4)
BUFFER = 16 * 2**20


def bench_read(job: BenchJob) -> str:
    """Read the output `bench.read` whole, each way in turn, `bench.repeats` times; medians, as ratios to a plain read.

    The first pass of each is not counted: a local output that fits into memory comes from the page cache.
    """
    path, options = str(job.bench.read), dict(job.output.storage_options)
    ways: dict[str, Callable[[], int]] = {
        "plain read": partial(_plain, path, options),
        **{f"reader, {workers} workers": partial(_reader, path, options, workers) for workers in WORKERS},
    }
    storage = _open(path, options)
    size = sum(info.size for info in storage.list(SHARDS))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    samples = 0
    for counted in [False] + [True] * job.bench.repeats:
        for name, way in ways.items():
            started = time.monotonic()
            samples = max(samples, way())
            if counted:
                seconds[name].append(time.monotonic() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    lines = [f"{'way':<20} {'GB/s':>7} {'ratio':>7} {'samples/s':>10}   of {size / 1e9:.2f} GB, {samples:,} samples"]
    for name, median in medians.items():
        rate = "" if name == "plain read" else f"{samples / median:,.0f}"
        lines.append(f"{name:<20} {size / median / 1e9:7.2f} {medians['plain read'] / median:7.2f} {rate:>10}")
    return "\n".join(lines)


def _open(path: str, options: dict[str, Any]) -> Storage:
    storage = open_storage(path, options)
    return find_shards(storage, load_run(storage))


def _plain(path: str, options: dict[str, Any]) -> int:
    """Every byte of every shard, into one buffer (S3: an object at a time)."""
    storage = _open(path, options)
    buffer = bytearray(BUFFER)
    for info in storage.list(SHARDS):
        local = storage.local_path(info.path)
        if local is None:
            storage.read_bytes(info.path)
            continue
        with Path(local).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return 0


def _reader(path: str, options: dict[str, Any], workers: int) -> int:
    """Every state of every sample; returns their number."""
    dataset = HiddenStatesDataset(path, storage_options=options)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=workers)
    return sum(1 for _ in loader)
