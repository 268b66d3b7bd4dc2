"""The input read and tokenized by Ray tasks; the tables come back in order, a few at a time."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import ray

from hs_ray.inputs import Chunk, TokenizeSettings, iter_chunk

AHEAD = 2  # chunks in work for each CPU, and tables of one chunk that wait for the driver


@ray.remote(num_cpus=1, max_retries=2, num_returns="streaming", _generator_backpressure_num_objects=AHEAD)
def _read(chunk: Chunk, settings: TokenizeSettings) -> Iterator[pa.Table]:
    yield from iter_chunk(chunk, settings)


def read_tables(chunks: Sequence[Chunk], settings: TokenizeSettings, cpus: int) -> Iterator[pa.Table]:
    """The tables of all chunks, in the chunks' order, whatever finishes first. Memory: a few tables a CPU."""
    waiting: deque[Any] = deque()
    left = iter(chunks)
    for chunk in left:
        waiting.append(_read.remote(chunk, settings))
        if len(waiting) >= AHEAD * cpus:
            break
    while waiting:
        for reference in waiting.popleft():
            yield ray.get(reference)
        for chunk in left:
            waiting.append(_read.remote(chunk, settings))
            break
