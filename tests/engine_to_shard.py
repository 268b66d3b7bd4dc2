"""A real engine whose states go through the job's own writers, in a process of its own, with an eye on its memory."""

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock, Thread

import numpy as np

from hs_ray.engine.engine import HiddenStateEngine
from hs_ray.engine.options import EngineOptions
from hs_ray.extract import extract_unit
from hs_ray.schema import Sample, shard_metadata
from hs_ray.storage import LocalStorage, Scratch
from hs_ray.writer import ShardWriter

RUN_S = 500
WRITERS = 4


class SlowStorage(LocalStorage):
    """A disk of so many bytes a second, shared by all that write to it: a writer stands still as in a full queue."""

    def __init__(self, root: str, bytes_per_s: float):
        super().__init__(root)
        self.bytes_per_s, self._lock, self._free_at = bytes_per_s, Lock(), 0.0

    def scratch(self, name: str) -> Scratch:
        scratch = super().scratch(name)
        reserve = scratch.reserve

        def slowly(need: int, min_free: int) -> str | None:
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + need / self.bytes_per_s
                wait = self._free_at - time.monotonic()
            time.sleep(wait)  # this is the disk's slowness itself
            return reserve(need, min_free)

        scratch.reserve = slowly  # type: ignore[method-assign]  # of this file alone
        return scratch


@dataclass(frozen=True)
class Written:
    seconds: float
    waited_s: float  # that submitting waited for shared memory
    bytes: int  # of states
    grown_bytes: int  # most private memory of the process while it ran, over what it had before


def write(
    options: EngineOptions, root: Path, units: Sequence[Sequence[np.ndarray]], slower: float | None = None
) -> Written:
    """Every unit of prompts becomes a shard under `root`; samples are called unit-number.

    slower: once more, into `root`/slow, with a disk that takes `slower` times as long as the first time; that one
    is returned.
    """
    context = multiprocessing.get_context("spawn")
    connection, child = context.Pipe()
    process = context.Process(target=_serve, args=(child, options, root, units, slower))
    process.start()
    child.close()  # so that a process that is gone is an end of file here
    assert connection.poll(RUN_S), "the engine's process did not answer"
    answer = connection.recv()
    process.join(60)
    if isinstance(answer, str):
        raise RuntimeError(answer)
    assert isinstance(answer, Written)
    return answer


def _serve(
    connection: Connection,
    options: EngineOptions,
    root: Path,
    units: Sequence[Sequence[np.ndarray]],
    slower: float | None,
) -> None:
    try:
        engine = HiddenStateEngine(options, poison=True)
        _write(engine, LocalStorage(str(root / "warm")), units[:1])
        written = _write(engine, LocalStorage(str(root)), units)
        if slower:
            rate = written.bytes / written.seconds / slower
            written = _write(engine, SlowStorage(str(root / "slow"), rate), units)
        connection.send(written)
        engine.close()
    except BaseException:  # noqa: BLE001  (told to the test, which raises it)
        connection.send(traceback.format_exc())


def _write(engine: HiddenStateEngine, storage: LocalStorage, units: Sequence[Sequence[np.ndarray]]) -> Written:
    spec = engine.options.spec
    metadata = shard_metadata(spec, model="test", revision=None, fingerprint="test", compression="none", versions={})

    def one(unit: int) -> float:
        samples = [
            Sample(f"{unit}-{i}", "test", i, ids, np.ones(len(ids), np.uint8)) for i, ids in enumerate(units[unit])
        ]
        writer = ShardWriter(storage, unit, "0001-test", 1, spec, "none", metadata, "test", 0)
        waited = extract_unit(engine, writer, samples)
        writer.commit("test", 0.0)
        return waited

    started, before = time.monotonic(), _private_bytes()
    most, stop = [before], Event()
    watch = Thread(target=_watch, args=(most, stop))
    watch.start()
    try:
        with ThreadPoolExecutor(WRITERS) as pool:
            waited = sum(pool.map(one, range(len(units))))
    finally:
        stop.set()
        watch.join()
    size = sum(len(ids) for unit in units for ids in unit) * spec.bytes_per_token
    return Written(time.monotonic() - started, waited, size, max(most) - before)


def _watch(most: list[int], stop: Event) -> None:
    while not stop.wait(0.02):
        most.append(_private_bytes())


def _private_bytes() -> int:
    """Resident memory without the ring, which is shared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")
