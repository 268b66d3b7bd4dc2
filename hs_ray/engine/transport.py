"""Rows of a batch -> shared memory -> a descriptor to the actor. Runs in the scheduler process of rank 0.

On CPU a plain copy. On CUDA device to host by DMA on a side stream, straight into the registered pages; a
thread waits for the copies and sends the descriptors, so the scheduler goes on to the next batch at once.

A descriptor is JSON: {"rid", "start", "count", "stats": one [sum_squares, absmax, nonfinite_rows, zero_rows,
checksum] a column}. The statistics are taken on the device, before the first copy, where they cost nothing next
to the forward pass: whatever goes wrong on the way to the file shows against them.

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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hs_ray.schema import weighted_checksum

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
        hello = {"hello": os.getpid(), "device": device.type, "architecture": setup.architecture}
        connection.send_bytes(json.dumps(hello).encode())
        kind = CudaTransport if device.type == "cuda" else Transport
        return kind(connection, ring, setup.spec.hidden_size)

    def send(self, ranges: Sequence[RowRange], columns: Sequence[torch.Tensor]) -> None:
        """columns: C bf16 tensors [T, H] of one batch."""
        self._copy(ranges, columns)
        self._announce(ranges, RowStatistics(*_row_statistics(columns)))

    def _copy(self, ranges: Sequence[RowRange], columns: Sequence[torch.Tensor]) -> None:
        width = self.hidden_size
        for rows in ranges:
            for index, column in enumerate(columns):
                first = rows.offset // 2 + (index * rows.num_tokens + rows.start) * width
                target = self.ring[first : first + rows.count * width].view(rows.count, width)
                target.copy_(column[rows.row : rows.row + rows.count], non_blocking=True)

    def _announce(self, ranges: Sequence[RowRange], statistics: "RowStatistics") -> None:
        for rows in ranges:
            record = {"rid": rows.rid, "start": rows.start, "count": rows.count, "stats": statistics.of(rows)}
            self.connection.send_bytes(json.dumps(record).encode())


class CudaTransport(Transport):
    """The same over DMA; ordered by events, never by waiting in the scheduler."""

    def __init__(self, connection: Connection, ring: torch.Tensor, hidden_size: int):
        super().__init__(connection, ring, hidden_size)
        # Registered pages are pinned: copies into them are asynchronous and run at the bus's rate.
        code = torch.cuda.cudart().cudaHostRegister(ring.data_ptr(), ring.numel() * 2, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of {ring.numel() * 2:,} bytes failed with {code}")
        self.stream = torch.cuda.Stream()
        self.pending: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        Thread(target=self._complete, name="hs_ray-complete", daemon=True).start()

    def send(self, ranges: Sequence[RowRange], columns: Sequence[torch.Tensor]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._copy(ranges, columns)
            host = [_to_pinned(statistic) for statistic in _row_statistics(columns)]
            done = torch.cuda.Event()
            done.record(self.stream)
        for column in columns:  # the allocator must not hand their memory out before the copies are done
            column.record_stream(self.stream)
        self.pending.put((done, list(ranges), RowStatistics(*host)))

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


def _row_statistics(columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every row: L2 norm and largest absolute value, float32 [C, T]; sum of its bits as int16, int64 [C, T]."""
    norms = torch.stack([torch.linalg.vector_norm(c, dim=-1, dtype=torch.float32) for c in columns])
    peaks = torch.stack([torch.linalg.vector_norm(c, ord=float("inf"), dim=-1, dtype=torch.float32) for c in columns])
    sums = torch.stack([c.contiguous().view(torch.int16).sum(-1, dtype=torch.int64) for c in columns])
    return norms, peaks, sums


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass
class RowStatistics:
    """Of a batch, on the host; see `_row_statistics`."""

    norms: torch.Tensor
    peaks: torch.Tensor
    sums: torch.Tensor

    def of(self, rows: RowRange) -> list[list[float]]:
        """One [sum_squares, absmax, nonfinite_rows, zero_rows, checksum] a column, over one request's rows."""
        part = slice(rows.row, rows.row + rows.count)
        norms, peaks, sums = (t[:, part].numpy() for t in (self.norms, self.peaks, self.sums))
        finite = np.isfinite(peaks)
        squares = np.where(finite, norms.astype(np.float64) ** 2, 0.0).sum(axis=1)
        absmax = np.where(finite, peaks, 0.0).max(axis=1)
        return [
            [float(squares[c]), float(absmax[c]), int((~finite[c]).sum()), int((peaks[c] == 0).sum()), checksum]
            for c, checksum in enumerate(weighted_checksum(row_sums, rows.start) for row_sums in sums)
        ]
