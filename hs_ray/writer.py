"""States -> shard -> marker: one attempt of one unit, committed whole or not at all.

The commit, and what a death between two steps leaves behind:

    rows written under `_run/tmp` (S3: a nameless local file)      nothing visible
    closed, hashed, footer read back                               nothing visible
    fsynced and moved to `shards/` (S3: uploaded)                  a shard that no marker names: it does not exist
    epoch checked: an older driver's attempt stops here            the same
    marker created exclusively                                     committed

Sizes: S tokens of a sample, H hidden size, C state columns.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
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
)
from hs_ray.storage import GrowingHash, OnWait, Scratch, Storage, wait_while, when_there_is_room

FOOTER_BYTES = 64 * 2**10  # room kept for the footer: schema and metadata ...
FOOTER_BYTES_PER_CELL = 256  # ... and what each column of each row group adds


class ShardWriter:
    """Collects the samples of one unit into one Parquet file. For one thread at a time.

    storage, unit, attempt, epoch: whose work this is (`lease.begin_attempt` gives the attempt's id).
    compression: `none` or `split_zstd`. metadata: what the file says of itself (`schema.shard_metadata`).
    min_free_bytes: `add` waits while the disk has less room than this, or none for the next row.
    on_wait: called while waiting.
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
        on_wait: OnWait | None = None,
    ):
        self.storage, self.unit, self.attempt, self.epoch = storage, unit, attempt, epoch
        self.spec, self.compression, self.fingerprint = spec, compression, fingerprint
        self.min_free_bytes, self.on_wait = min_free_bytes, on_wait
        self._schema = shard_schema(spec.columns, compression, metadata | {"unit": unit, "attempt": attempt})
        self._shard = shard_path(unit, attempt)
        self._scratch: Scratch | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._hash: GrowingHash | None = None
        self._stats = {name: ColumnStats() for name in spec.columns}
        self._checksums: dict[str, list[int]] = {}
        self._failed: list[Reject] = []
        self._ids: set[str] = set()
        self._rows = self._tokens = 0
        self._published = self._claimed = False

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
        self._checksums[sample.sample_id] = [column.checksum for column in stats]
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
        # Parquet stores a loss mask in 4 bytes a value and lists with levels of their own.
        self._wait_for_room(scratch, sum(array.nbytes for array in arrays) + 16 * count)
        parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=1)
        digest.advance(scratch.size)
        self._rows += 1

    def _open(self) -> tuple[pq.ParquetWriter, Scratch, GrowingHash]:
        if self._parquet is None or self._scratch is None or self._hash is None:
            name = Path(self._shard).name
            self._scratch = when_there_is_room(lambda: self.storage.scratch(name), self.on_wait)
            self._hash = GrowingHash(self._scratch.fd)
            # Statistics let a reader skip to a sample; of the states they would cost more than writing them.
            small = [field.name for field in self._schema if not pa.types.is_large_binary(field.type)]
            high = [n for n in self._schema.names if self.compression == "split_zstd" and n.endswith("_hi")]
            path = self._scratch.path
            self._parquet = when_there_is_room(  # it begins the file at once, before room is reserved
                lambda: pq.ParquetWriter(
                    path,
                    self._schema,
                    use_dictionary=False,
                    write_statistics=[name for name in small if name not in ("input_ids", "loss_mask")],
                    compression=dict.fromkeys(high, "ZSTD") or "NONE",
                    compression_level=dict.fromkeys(high, 1) or None,
                ),
                self.on_wait,
            )
        return self._parquet, self._scratch, self._hash

    def _wait_for_room(self, scratch: Scratch, row_bytes: int) -> None:
        footer = FOOTER_BYTES + (self._rows + 1) * len(self._schema) * FOOTER_BYTES_PER_CELL
        wait_while(lambda: scratch.reserve(row_bytes + footer, self.min_free_bytes), self.on_wait)

    # --- the end of the attempt ---

    def commit(self, engine: str, seconds: float) -> Marker:
        """Publish the shard and then its marker; the marker that counts is returned, ours or an earlier one.

        engine: who computed it; seconds: how long that took. A unit with no sample left has no shard. Raises
        LostLeaseError if a newer driver holds the output. After any exception call `discard`: nothing partial
        is visible, and a marker that may have been made although `create` failed names a whole shard.
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
            checksums=self._checksums,
            failed=self._failed,
            engine=engine,
            seconds=seconds,
            node=self.storage.node if self._rows else "",
        )
        check_epoch(self.storage, self.epoch)
        return self._claim(marker)

    def _publish(self) -> tuple[int, str]:
        parquet, scratch, digest = self._open()
        parquet.close()
        size = scratch.size
        scratch.trim()
        sha256 = digest.finish(size)
        with pq.ParquetFile(scratch.path) as file:
            found = (file.metadata.num_rows, file.metadata.num_row_groups, file.schema_arrow.names)
        if found != (self._rows, self._rows, self._schema.names):
            raise HsRayError(f"{self._shard}: read back {found[:2]} rows and row groups, wrote {self._rows}")
        self._published = True  # from here on it may be there, also if `publish` raises
        when_there_is_room(lambda: self.storage.publish(scratch, self._shard), self.on_wait)
        scratch.close()
        return size, sha256

    def _claim(self, marker: Marker) -> Marker:
        """Create the marker. If another attempt has, its shard stands and ours goes."""
        path = marker_path(self.unit)
        while True:
            self._claimed = True
            if when_there_is_room(lambda: self.storage.create(path, marker.to_json().encode()), self.on_wait):
                return marker
            self._claimed = False  # the marker is surely another's
            try:
                other = Marker.from_json(self.storage.read_bytes(path))
            except FileNotFoundError:
                continue
            if other.fingerprint == self.fingerprint and shard_is_whole(self.storage, other):
                self.discard()
                return other
            # A zombie of a dead driver made it after its shard had been cleared away.
            self.storage.remove(path)

    def discard(self) -> None:
        """Leave nothing of an attempt that did not commit. Safe at any time, also after `commit`."""
        if self._hash is not None:
            self._hash.close()
        if self._scratch is not None:
            self._scratch.close()
        if self._parquet is not None and self._parquet.is_open:
            with contextlib.suppress(Exception):  # it only wants to write a footer into a file that is gone
                self._parquet.close()
        # A marker may exist although `create` raised (its answer was lost): then the shard has to stay. If the
        # marker does not exist after all, the next start clears the shard away.
        if self._published and not self._claimed:
            self.storage.remove(self._shard)
            self._published = False


def shard_is_whole(storage: Storage, marker: Marker) -> bool:
    """Whether the shard that a marker names is there with the size it says. On another node's disk it is believed:
    the driver looks there, at its start and before the manifest."""
    if not storage.holds(marker.node):
        return True
    try:
        return marker.shard is None or storage.size(marker.shard) == marker.bytes
    except FileNotFoundError:
        return False


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
    items = pa.array(np.ascontiguousarray(values, dtype=dtype))
    return pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items)
