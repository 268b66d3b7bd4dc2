"""States -> shard -> marker: one attempt of one unit, committed whole or not at all.

The commit, and what a death between two steps leaves behind:

    rows written under `_run/tmp` (S3: a nameless local file)      nothing visible
    closed, hashed, footer read back                               nothing visible
    fsynced and moved to `shards/` (S3: uploaded)                  a shard that no marker names: it does not exist
    epoch checked: an older driver's attempt stops here            the same
    marker created exclusively                                     committed

Sizes: S tokens of a sample, H hidden size, C state columns.
"""

import ctypes
import errno
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hs_ray.errors import CaptureError, HsRayError
from hs_ray.lease import check_epoch
from hs_ray.schema import (
    CaptureSpec,
    ColumnStats,
    Marker,
    Reject,
    Sample,
    marker_path,
    shard_path,
    shard_schema,
    stored_columns,
)
from hs_ray.storage import Scratch, Storage

POLL_SECONDS = 1.0  # between looks at a full disk
FOOTER_BYTES = 2**20  # room kept for the footer: a row group costs it about 200 bytes a column
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_FALLOC_FL_KEEP_SIZE = 1


class ShardWriter:
    """Collects the samples of one unit into one Parquet file. For one thread at a time.

    storage, unit, attempt, epoch: whose work this is (`lease.begin_attempt` gives the attempt's id).
    compression: `none` or `split_zstd`. metadata: what the file says of itself (`schema.shard_metadata`).
    min_free_bytes: `add` waits while the disk has less room than this, or none for the next row.
    on_wait(reason, seconds waited so far): called while waiting; what it raises ends the wait.
    """

    def __init__(
        self,
        storage: Storage,
        unit: int,
        attempt: str,
        epoch: int,
        spec: CaptureSpec,
        compression: str,
        metadata: dict[str, Any],
        fingerprint: str,
        min_free_bytes: int,
        on_wait: Callable[[str, float], None] | None = None,
    ):
        self.storage, self.unit, self.attempt, self.epoch = storage, unit, attempt, epoch
        self.spec, self.compression, self.fingerprint = spec, compression, fingerprint
        self.min_free_bytes, self.on_wait = min_free_bytes, on_wait
        self._schema = shard_schema(spec.columns, compression, metadata | {"unit": unit, "attempt": attempt})
        self._shard = shard_path(unit, attempt)
        self._scratch: Scratch | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._hash: _GrowingHash | None = None
        self._stats = {name: ColumnStats() for name in spec.columns}
        self._failed: list[Reject] = []
        self._ids: set[str] = set()
        self._rows = self._tokens = 0

    # --- samples ---

    def add(self, sample: Sample, states: Sequence[np.ndarray], stats: Sequence[ColumnStats]) -> None:
        """Write one sample out; its arrays may be reused on return.

        states: C arrays, uint16 [S, H] (bf16 bits), C-contiguous, in the order of `spec.columns`; not copied on
        their way to Parquet. stats: one a column. Raises CaptureError if count, shape or dtype is not what the
        sample needs; OSError from the disk, after which only `discard` is left.
        """
        self._check(sample, states, stats)
        self._ids.add(sample.sample_id)
        for start, count in self.spec.pieces(sample.num_tokens):
            self._write_row(sample, start, count, states)
        for name, column in zip(self.spec.columns, stats, strict=True):
            self._stats[name] += column
        self._tokens += sample.num_tokens

    def fail(self, sample: Sample, code: str, message: str) -> None:
        """Record that a sample has no states, and why."""
        self._failed.append(Reject(sample.sample_id, sample.source, sample.line, code, message))

    def _check(self, sample: Sample, states: Sequence[np.ndarray], stats: Sequence[ColumnStats]) -> None:
        columns, tokens, hidden = self.spec.columns, sample.num_tokens, self.spec.hidden_size
        where = f"sample {sample.sample_id} (unit {self.unit}, {sample.source} line {sample.line})"
        if sample.sample_id in self._ids:
            raise CaptureError(f"{where}: written twice")
        if tokens == 0 or len(sample.loss_mask) != tokens:
            raise CaptureError(f"{where}: {tokens} tokens, {len(sample.loss_mask)} loss mask values")
        if len(states) != len(columns) or len(stats) != len(columns):
            raise CaptureError(f"{where}: {len(states)} states, {len(stats)} statistics for {len(columns)} columns")
        for name, state, column in zip(columns, states, stats, strict=True):
            if state.shape != (tokens, hidden):
                raise CaptureError(
                    f"{where}: {name} is {list(state.shape)}, needs [{tokens}, {hidden}]: "
                    f"{state.size} values of {tokens * hidden} ({tokens} tokens x {hidden})"
                )
            if state.dtype != np.uint16 or not state.flags.c_contiguous:
                raise CaptureError(f"{where}: {name} is {state.dtype}, strides {state.strides}; needs uint16, C order")
            if column.rows != tokens:
                raise CaptureError(f"{where}: {name} has statistics of {column.rows} rows for {tokens} tokens")

    def _write_row(self, sample: Sample, start: int, count: int, states: Sequence[np.ndarray]) -> None:
        stop = start + count
        cells = [_cell(half) for state in states for half in _stored(state[start:stop], self.compression)]
        arrays = [
            pa.array([sample.sample_id], pa.string()),
            pa.array([sample.source], pa.string()),
            pa.array([sample.line], pa.int64()),
            pa.array([count], pa.int32()),
            pa.array([sample.num_tokens], pa.int32()),
            _list_of_one(sample.input_ids[start:stop], np.int32),
            _list_of_one(sample.loss_mask[start:stop], np.uint8),
            pa.array([start], pa.int32()),
            *cells,
        ]
        parquet, scratch, digest = self._open()
        self._reserve(scratch, sum(array.nbytes for array in arrays) + 4 * count)
        parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=1)
        digest.advance(scratch.size)
        self._rows += 1

    def _open(self) -> tuple[pq.ParquetWriter, Scratch, "_GrowingHash"]:
        if self._parquet is None or self._scratch is None or self._hash is None:
            self._scratch = self.storage.scratch(os.path.basename(self._shard))
            self._hash = _GrowingHash(self._scratch.fd)
            # Statistics let a reader skip to a sample; of the states they would cost more than writing them.
            small = [field.name for field in self._schema if not pa.types.is_large_binary(field.type)]
            high = [name for name in stored_columns(self.spec.columns, self.compression) if name.endswith("_hi")]
            split = self.compression == "split_zstd"
            self._parquet = pq.ParquetWriter(
                self._scratch.path,
                self._schema,
                use_dictionary=False,
                write_statistics=[name for name in small if name not in ("input_ids", "loss_mask")],
                compression={name: "ZSTD" if name in high else "NONE" for name in self._leaves()} if split else "NONE",
                compression_level=dict.fromkeys(high, 1) if split else None,
            )
        return self._parquet, self._scratch, self._hash

    def _leaves(self) -> list[str]:
        """Parquet's names of the columns: a list's values have a longer one."""
        return [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in self._schema]

    # --- room on the disk ---

    def _reserve(self, scratch: Scratch, row_bytes: int) -> None:
        """Wait until the next row surely fits.

        fallocate(2) takes the blocks before Parquet writes, so a disk that fills meanwhile fails here, where
        waiting loses nothing, and not in the middle of a row group. The spare blocks are given back at the end.
        """
        need, waited = row_bytes + FOOTER_BYTES, 0.0
        while True:
            free = scratch.free_bytes()
            if free < need + self.min_free_bytes:
                reason = f"{free} bytes free, {need} needed and {self.min_free_bytes} to be left (output.min_free_bytes)"
            elif _libc.fallocate(scratch.fd, _FALLOC_FL_KEEP_SIZE, scratch.size, need) == 0:
                return
            elif ctypes.get_errno() in DISK_FULL:
                reason = f"{os.strerror(ctypes.get_errno())}: {need} bytes needed"
            else:  # a file system without fallocate: the look at the free space has to do
                return
            if self.on_wait is not None:
                self.on_wait(f"{unit_disk(self.storage, scratch)}: {reason}", waited)
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS

    # --- the end of the attempt ---

    def commit(self, engine: str, seconds: float) -> Marker:
        """Publish the shard and then its marker; the marker that counts is returned, ours or an earlier one.

        engine: who computed it; seconds: how long that took. A unit with no sample left has no shard. Raises
        LostLeaseError if a newer driver holds the output. On any exception nothing is committed by this
        attempt that can be told, and nothing partial is visible; call `discard`.
        """
        size, digest = self._publish() if self._rows else (0, "")
        marker = Marker(
            unit=self.unit,
            attempt=self.attempt,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            shard=self._shard if self._rows else None,
            bytes=size,
            sha256=digest,
            samples=len(self._ids),
            rows=self._rows,
            tokens=self._tokens,
            columns=self._stats,
            failed=self._failed,
            engine=engine,
            seconds=seconds,
        )
        try:
            check_epoch(self.storage, self.epoch)
        except BaseException:
            self._remove_shard()
            raise
        return self._claim(marker)

    def _publish(self) -> tuple[int, str]:
        parquet, scratch, digest = self._open()
        parquet.close()
        size = scratch.size
        os.ftruncate(scratch.fd, size)  # gives back what was reserved and not used
        sha256 = digest.finish(size)
        with pq.ParquetFile(scratch.path) as file:
            found = (file.metadata.num_rows, file.metadata.num_row_groups, file.schema_arrow.names)
        if found != (self._rows, self._rows, self._schema.names):
            raise HsRayError(f"{self._shard}: read back {found[:2]} rows and row groups, wrote {self._rows}")
        self.storage.publish(scratch, self._shard)
        scratch.close()
        return size, sha256

    def _claim(self, marker: Marker) -> Marker:
        """Create the marker. If another attempt has, its shard stands and ours goes.

        An exception in `create` may come after the marker was made: then our shard must stay, for the marker
        may name it; if it does not, the next start removes it.
        """
        path = marker_path(self.unit)
        while True:
            if self.storage.create(path, marker.to_json().encode()):
                return marker
            try:
                other = Marker.from_json(self.storage.read_bytes(path))
            except FileNotFoundError:
                continue
            if shard_is_whole(self.storage, other):
                self._remove_shard()
                return other
            # Of a dead driver's zombie: its marker came after its shard had been cleared away.
            self.storage.remove(path)

    def _remove_shard(self) -> None:
        if self._rows:
            self.storage.remove(self._shard)

    def discard(self) -> None:
        """Leave nothing of an attempt that will not commit. Safe at any time, also after `commit`."""
        if self._hash is not None:
            self._hash.close()
        if self._scratch is not None:
            self._scratch.close()
        if self._parquet is not None and self._parquet.is_open:
            try:
                self._parquet.close()
            except OSError:  # a full disk: it only wanted to write a footer into a file that is gone
                pass


def unit_disk(storage: Storage, scratch: Scratch) -> str:
    return storage.root if storage.is_local else f"{os.path.realpath(scratch.path).partition(' ')[0]} (upload buffer)"


def shard_is_whole(storage: Storage, marker: Marker) -> bool:
    """Whether the shard that a marker names is there with the size it says."""
    try:
        return marker.shard is None or storage.size(marker.shard) == marker.bytes
    except FileNotFoundError:
        return False


class _GrowingHash:
    """sha256 of a file while it grows, on a thread of its own.

    Hashing is no faster than writing (1.3 against 1.5 GB/s on one core), so doing both on one thread halves the
    rate. The file is read back through its mapped pages in long updates: both hashing and writing run without
    the interpreter's lock, and the lock changes hands once a row, not once a small buffer.
    """

    def __init__(self, fd: int):
        self._fd, self._at, self._sha = fd, 0, hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard-hash")
        self._last: Future[None] | None = None

    def advance(self, size: int) -> None:
        """The first `size` bytes will not change any more."""
        self._last = self._pool.submit(self._update, size)

    def _update(self, size: int) -> None:
        base = self._at - self._at % mmap.ALLOCATIONGRANULARITY
        if size > self._at:
            with mmap.mmap(self._fd, size - base, mmap.MAP_SHARED, mmap.PROT_READ, offset=base) as mapped:
                with memoryview(mapped) as view:
                    self._sha.update(view[self._at - base :])
            self._at = size

    def finish(self, size: int) -> str:
        self.advance(size)
        self.close()
        assert self._last is not None
        self._last.result()
        return self._sha.hexdigest()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=False)


def _stored(state: np.ndarray, compression: str) -> list[np.ndarray]:
    """The uint8 arrays that hold uint16 [S, H] bits: the whole, or its high and low bytes apart."""
    octets = state.reshape(-1).view(np.uint8)
    if compression == "split_zstd":
        return [np.ascontiguousarray(octets[1::2]), np.ascontiguousarray(octets[0::2])]
    return [octets]


def _cell(octets: np.ndarray) -> pa.LargeBinaryArray:
    """One Parquet cell over the array's own memory."""
    offsets = pa.py_buffer(np.array([0, octets.nbytes], dtype=np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(octets)])


def _list_of_one(values: Any, dtype: type) -> pa.ListArray:
    array = np.ascontiguousarray(values, dtype=dtype)
    return pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), pa.array(array))
