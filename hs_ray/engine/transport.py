"""Rows of a batch -> shared memory -> a descriptor to the actor. Runs in the scheduler process of rank 0.

On CPU a plain copy. On CUDA device to host by DMA on a side stream, straight into the registered pages; a
thread waits for the copies and sends the descriptors, so the scheduler goes on to the next batch at once.

A descriptor is JSON: {"rid", "start", "count", "stats": one [sum_squares, absmax, nonfinite_rows, zero_rows,
checksum] a column}; see `row_statistics`.

T rows of a batch, H hidden_size, C state columns.
"""

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import torch

from hs_ray.engine import row_statistics
from hs_ray.engine.row_statistics import RowStatistics

if TYPE_CHECKING:
    from hs_ray.engine.capture import CaptureSetup


@dataclass(frozen=True)
class RowRange:
    """Tokens [start, start + count) of one request: rows [row, row + count) of the batch."""

    rid: str
    offset: int  # of the request's extent in the ring, bytes
    num_tokens: int  # S of the whole request
    start: int
    count: int
    row: int


class Transport:
    """Copies rows and sends descriptors. This class is the CPU's; `CudaTransport` overlaps both with compute."""

    def __init__(self, connection: Connection, ring: torch.Tensor, hidden_size: int):
        self.connection, self.ring, self.hidden_size = connection, ring, hidden_size

    @staticmethod
    def connect(setup: "CaptureSetup", device: torch.device) -> "Transport":
        connection = Client(setup.address, family="AF_UNIX", authkey=setup.authkey)
        fd = os.open(setup.ring_path, os.O_RDWR)
        ring = torch.frombuffer(mmap.mmap(fd, setup.ring_size), dtype=torch.bfloat16)
        os.close(fd)
        kind = CudaTransport if device.type == "cuda" else Transport
        return kind(connection, ring, setup.spec.hidden_size)

    def send(self, ranges: Sequence[RowRange], columns: Sequence[torch.Tensor]) -> None:
        """columns: C bf16 tensors [T, H] of one batch."""
        self._copy(ranges, columns)
        self._announce(ranges, row_statistics.of_rows(columns))

    def _copy(self, ranges: Sequence[RowRange], columns: Sequence[torch.Tensor]) -> None:
        width = self.hidden_size
        for rows in ranges:
            for index, column in enumerate(columns):
                first = rows.offset // 2 + (index * rows.num_tokens + rows.start) * width
                target = self.ring[first : first + rows.count * width].view(rows.count, width)
                target.copy_(column[rows.row : rows.row + rows.count], non_blocking=True)

    def _announce(self, ranges: Sequence[RowRange], statistics: RowStatistics) -> None:
        for rows in ranges:
            stats = statistics.of(rows.row, rows.count, rows.start)
            record = {"rid": rows.rid, "start": rows.start, "count": rows.count, "stats": stats}
            self.connection.send_bytes(json.dumps(record).encode())


class CudaTransport(Transport):
    """The same over DMA; ordered by events, never by waiting in the scheduler."""

    def __init__(self, connection: Connection, ring: torch.Tensor, hidden_size: int):
        from hs_ray.engine.row_kernel import of_rows  # there is no triton without a GPU

        super().__init__(connection, ring, hidden_size)
        # Registered pages are pinned: copies into them are asynchronous and run at the bus's rate.
        code = torch.cuda.cudart().cudaHostRegister(ring.data_ptr(), ring.numel() * 2, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of {ring.numel() * 2:,} bytes failed with {code}")
        self.of_rows = of_rows
        self.stream = torch.cuda.Stream()
        self.pending: SimpleQueue[tuple[torch.cuda.Event, list[RowRange], RowStatistics]] = SimpleQueue()
        Thread(target=self._complete, name="hs_ray-complete", daemon=True).start()

    def send(self, ranges: Sequence[RowRange], columns: Sequence[torch.Tensor]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            packed, statistics = self.of_rows(columns)
            self._copy(ranges, packed)
            on_host = statistics.to_host()
            done = torch.cuda.Event()
            done.record(self.stream)
        for column in columns:  # the allocator must not hand their memory out before the copies are done
            column.record_stream(self.stream)
        self.pending.put((done, list(ranges), on_host))

    def _complete(self) -> None:
        try:
            while True:
                done, ranges, statistics = self.pending.get()
                done.synchronize()
                self._announce(ranges, statistics)
        except BaseException:
            # Without descriptors every request would wait for ever: end the scheduler, and the actor with it.
            import traceback

            traceback.print_exc()
            os.kill(os.getpid(), 9)
