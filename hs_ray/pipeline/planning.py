"""The input read and tokenized by Ray tasks; the tables come back in order, a few at a time."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import ray

from hs_ray.errors import HsRayError
from hs_ray.inputs import Chunk, TokenizeSettings, iter_chunk

AHEAD = 2  # chunks in work for each CPU, and tables of one chunk that wait for the driver


@ray.remote(num_cpus=1, max_retries=2, num_returns="streaming", _generator_backpressure_num_objects=AHEAD)
def _read(chunk: Chunk, settings: TokenizeSettings) -> Iterator[pa.Table]:
    yield from iter_chunk(chunk, settings)


def read_tables(chunks: Sequence[Chunk], settings: TokenizeSettings, cpus: int) -> Iterator[pa.Table]:
    """The tables of all chunks, in the chunks' order, whatever finishes first. Memory: a few tables a CPU.

    Raises what a task raised, an InputError for a damaged file. Tasks still at work when it is closed are cancelled.
    """
    waiting: deque[Any] = deque()
    left = iter(chunks)
    try:
        for chunk in left:
            waiting.append(_read.remote(chunk, settings))
            if len(waiting) >= AHEAD * cpus:
                break
        while waiting:
            for reference in waiting[0]:
                yield _get(reference)
            waiting.popleft()
            for chunk in left:
                waiting.append(_read.remote(chunk, settings))
                break
    finally:
        for task in waiting:
            ray.cancel(task, force=True)  # a polite one waits for Python code to notice; nothing here needs a clean end


def _get(reference: Any) -> pa.Table:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, HsRayError) else error) from None


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
