"""One sample in the engine, from its submission to its states.

S tokens of a sample, H hidden_size, C state columns.
"""

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from hs_ray.engine.ring import Extent
from hs_ray.errors import CaptureError
from hs_ray.schema import ColumnStats


@dataclass(frozen=True)
class SampleStates:
    """states: one uint16 [S, H] view (bf16 bits) a column, in shared memory until `Ticket.release`."""

    states: list[npt.NDArray[np.uint16]]
    stats: list[ColumnStats]


class Ticket:
    """One sample in the engine."""

    def __init__(self, rid: str, num_tokens: int, extent: Extent, columns: int, waited_s: float):
        self.rid, self.num_tokens, self.extent, self.waited_s = rid, num_tokens, extent, waited_s
        self.future: Future[SampleStates] = Future()
        self.released = False
        self.parts: list[int] = []  # tokens of each forward pass that the sample was split into
        self.over = False  # SGLang is done with the request, whatever came of it
        self._covered = 0
        self._answered = False
        self._stats = [ColumnStats()] * columns
        self._lock = Lock()

    def arrived(self, start: int, count: int, stats: list[list[Any]]) -> bool:
        """Rows [start, start + count) are in shared memory. True once the sample is complete."""
        with self._lock:
            if start != self._covered or start + count > self.num_tokens:
                self.fail(
                    CaptureError(
                        f"{self.rid}: rows {start} to {start + count} of {self.num_tokens} arrived after the first "
                        f"{self._covered}: {start - self._covered} tokens were not computed or came twice "
                        "(is a prefix cache on?)"
                    )
                )
                return False
            self._covered += count
            self.parts.append(count)
            self._stats = [
                total + ColumnStats(count, *values) for total, values in zip(self._stats, stats, strict=True)
            ]
            return self._answered and self._covered == self.num_tokens

    def answered(self) -> bool:
        with self._lock:
            self._answered = True
            return self._covered == self.num_tokens

    def expire(self) -> None:
        self.fail(CaptureError(f"{self.rid}: answered, but {self._covered} of {self.num_tokens} tokens arrived"))

    @property
    def stats(self) -> list[ColumnStats]:
        return self._stats

    def complete(self, states: SampleStates) -> None:
        with suppress(InvalidStateError):  # several threads may end a ticket: the first one does
            self.future.set_result(states)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class BusyClock:
    """Seconds during which at least one is inside."""

    def __init__(self) -> None:
        self._inside, self._since, self._total = 0, 0.0, 0.0
        self._lock = Lock()

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._since = monotonic()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._total += monotonic() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._total + (monotonic() - self._since if self._inside else 0.0)
