"""Shared memory between one actor and its scheduler process: the actor reserves, the scheduler writes.

A sample's extent is contiguous: column after column, each [S, H] bf16, so that Arrow takes the pages as they
are. The memory is an anonymous file (memfd): it has no name, so nothing is left behind whatever is killed.
"""

import bisect
import mmap
import os
from dataclasses import dataclass
from threading import Condition
from time import monotonic

import numpy as np
import numpy.typing as npt

from hs_ray.errors import CaptureError

ALIGN = 4096  # pages; DMA and Arrow are both content with it


@dataclass(frozen=True)
class Extent:
    offset: int  # bytes from the start of the ring
    size: int  # bytes, a multiple of ALIGN


class Ring:
    """The actor's side: first-fit allocation, served strictly in order of asking.

    In order, so that a large sample is never starved by small ones, and so that every reserved sample's
    predecessors in its unit are reserved too: writers always have something to free.
    """

    def __init__(self, size: int):
        self.size = -(-size // ALIGN) * ALIGN
        self.fd = os.memfd_create("hs_ray", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._free = [Extent(0, self.size)]  # by offset, never adjacent
        self._changed = Condition()
        self._next_turn = self._serving = 0
        self._closed: str | None = None

    @property
    def path(self) -> str:
        """Where another process of this user opens it, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def used(self) -> int:
        with self._changed:
            return self.size - sum(extent.size for extent in self._free)

    def reserve(self, size: int) -> tuple[Extent, float]:
        """Wait for `size` contiguous bytes. Returns them and the seconds waited.

        Raises CaptureError if it can never fit, or once the ring is closed.
        """
        size = max(ALIGN, -(-size // ALIGN) * ALIGN)
        if size > self.size:
            raise CaptureError(f"a sample needs {size:,} bytes of shared memory and there are {self.size:,} in all")
        asked = monotonic()
        with self._changed:
            turn = self._next_turn
            self._next_turn += 1
            while self._closed is None:
                if turn == self._serving:
                    extent = self._take(size)
                    if extent is not None:
                        self._serving += 1
                        self._changed.notify_all()
                        return extent, monotonic() - asked
                self._changed.wait()
            raise CaptureError(self._closed)

    def _take(self, size: int) -> Extent | None:
        for index, free in enumerate(self._free):
            if free.size >= size:
                rest = [Extent(free.offset + size, free.size - size)] if free.size > size else []
                self._free[index : index + 1] = rest
                return Extent(free.offset, size)
        return None

    def release(self, extent: Extent) -> None:
        with self._changed:
            index = bisect.bisect(self._free, extent.offset, key=lambda e: e.offset)
            start, end = extent.offset, extent.offset + extent.size
            if index < len(self._free) and self._free[index].offset == end:
                end += self._free.pop(index).size
            if index and self._free[index - 1].offset + self._free[index - 1].size == start:
                index -= 1
                start = self._free.pop(index).offset
            self._free.insert(index, Extent(start, end - start))
            self._changed.notify_all()

    def view(self, extent: Extent, columns: int, num_tokens: int, hidden_size: int) -> list[npt.NDArray[np.uint16]]:
        """The extent as one uint16 [S, H] array (bf16 bits) a column; no copy."""
        cell = num_tokens * hidden_size * 2
        return [
            self._bytes[extent.offset + i * cell : extent.offset + (i + 1) * cell]
            .view(np.uint16)
            .reshape(num_tokens, hidden_size)
            for i in range(columns)
        ]

    def fill(self, extent: Extent, value: int) -> None:
        """Overwrite an extent with one byte value: 0xFF makes every number a NaN (used to prove capture)."""
        self._bytes[extent.offset : extent.offset + extent.size] = value

    def close(self, reason: str = "the engine is closed") -> None:
        """Wake everyone who waits. The memory itself goes when the last view of it does."""
        with self._changed:
            if self._closed is None:
                self._closed = reason
                os.close(self.fd)
            self._changed.notify_all()
