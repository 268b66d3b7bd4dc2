"""The input read and tokenized by Ray actors; the tables come back in order, a few at a time."""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pyarrow as pa
import ray

from hs_ray.errors import HsRayError
from hs_ray.inputs import Chunk, TokenizeSettings, iter_chunk
from hs_ray.lease import Lease

AHEAD = 2  # chunks in work for each reader, and tables of one chunk that wait for the driver


@ray.remote(num_cpus=1, max_restarts=2, max_task_retries=2)
class _Reader:
    """An actor and not a task, because its end is certain: after ray.cancel of a streaming task that is ahead of the
    driver, Ray 2.60 was seen to hold the task's CPU for good, and an engine may need it."""

    def __init__(self, settings: TokenizeSettings):
        self._settings = settings

    def ready(self) -> None:
        """Answers once the actor has found a place in the cluster."""

    @ray.method(num_returns="streaming", _generator_backpressure_num_objects=AHEAD)
    def read(self, chunk: Chunk) -> Iterator[pa.Table]:
        yield from iter_chunk(chunk, self._settings)


class _Readers:
    """As many readers as there is room for; one that finds none, where others use the cluster, is not waited for."""

    def __init__(self, count: int, settings: TokenizeSettings):
        self._starting: dict[Any, Any] = {}  # answer to come -> reader
        self._at_work: dict[Any, int] = {}  # reader -> its chunks
        for _ in range(count):
            reader = _Reader.remote(settings)  # type: ignore[attr-defined]  # ray.remote adds it
            self._starting[reader.ready.remote()] = reader

    def free(self) -> Any | None:
        """The reader with the fewest chunks, None if each has enough. Waits for the first to start."""
        waited_for = list(self._starting)
        if waited_for:
            ready, _ = ray.wait(waited_for, num_returns=len(waited_for), timeout=0)
            ready = ready or ([] if self._at_work else ray.wait(waited_for)[0])
            for answer in ready:
                ray.get(answer)
                self._at_work[self._starting.pop(answer)] = 0
        reader = min(self._at_work, key=self._at_work.__getitem__)
        return reader if self._at_work[reader] < AHEAD else None

    def read(self, reader: Any, chunk: Chunk) -> Any:
        self._at_work[reader] += 1
        return reader.read.remote(chunk)

    def done(self, reader: Any) -> None:
        self._at_work[reader] -= 1

    def end(self) -> None:
        if not ray.is_initialized():  # they ended with it; ray.kill would start a cluster
            return
        for reader in [*self._at_work, *self._starting.values()]:
            ray.kill(reader)


def read_tables(chunks: Sequence[Chunk], settings: TokenizeSettings, cpus: int) -> Generator[pa.Table]:
    """The tables of all chunks, in the chunks' order, whatever finishes first. Memory: a few tables a CPU.

    Raises what a reader raised, an InputError for a damaged file, a RunError in an outage. When it is closed the
    readers end, with all that they were reading ahead: close it where its tables are not all taken
    (contextlib.closing), also for an exception, whose traceback would keep it.
    """
    waiting: deque[tuple[Any, Any]] = deque()  # reader, its tables of one chunk
    left = deque(chunks)
    readers = _Readers(min(cpus, len(chunks)), settings)
    try:
        while waiting or left:
            while left and (reader := readers.free()):
                waiting.append((reader, readers.read(reader, left.popleft())))
            reader, tables = waiting.popleft()
            for reference in tables:
                yield _get(reference)
            readers.done(reader)
    finally:
        readers.end()


def _get(reference: Any) -> pa.Table:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, HsRayError | OSError) else error) from None


def while_held(tables: Iterator[pa.Table], lease: Lease) -> Iterator[pa.Table]:
    """The same tables. Raises LostLeaseError once a newer driver holds the output: what follows is written there."""
    for table in tables:
        lease.check()
        yield table
    lease.check()


def counted(tables: Iterator[pa.Table], every_s: float) -> Iterator[pa.Table]:
    """The same tables; says every `every_s` seconds how far the reading is."""
    started = told = time.monotonic()
    lines = tokens = 0
    for table in tables:
        lines += len(table)
        tokens += sum(len(chunk.values) for chunk in table["input_ids"].chunks)
        now = time.monotonic()
        if now - told >= every_s:
            rate = tokens / (now - started)
            print(f"hs_ray: planning: {lines:,} lines, {tokens:,} tokens, {rate:,.0f} tokens/s", flush=True)
            told = now
        yield table
