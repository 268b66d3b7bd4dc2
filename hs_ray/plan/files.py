"""The files of a plan: `_run/samples/part-NNNNN.parquet`, one row group a unit, and `_run/rejected.parquet`."""

import contextlib
import hashlib
import json
import uuid
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hs_ray.schema import REJECTED, SAMPLES, Reject
from hs_ray.storage import OnWait, Scratch, Storage, wait_while, when_there_is_room

UNITS_PER_FILE = 64
FOOTER_BYTES = 256 * 2**10  # room kept for the footer of a file: 64 row groups of six columns take a tenth
REJECTS_PER_GROUP = 16384
UNITS_KEY = "hs_ray_units"  # key of the JSON in a part's metadata: [[unit, samples, tokens, digest], ...]

PLAN = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("unit", pa.int32(), nullable=False),
    ]
)
REJECTS = pa.schema(
    [
        pa.field("sample_id", pa.string()),  # null: the line gave none
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)


def part_path(unit: int, units_per_file: int = UNITS_PER_FILE) -> str:
    """The file that holds a unit's samples, as row group `unit % units_per_file`."""
    return f"{SAMPLES}/part-{unit // units_per_file:05d}.parquet"


def unit_buckets(sizes: np.ndarray, unit_tokens: int, before: int = 0) -> np.ndarray:
    """sizes: tokens of samples that follow `before` tokens -> a number for each, the same for those of one unit.

    A sample's bucket is where its middle falls among all tokens: one running total is enough to know it.
    """
    return (before + np.cumsum(sizes) - (sizes + 1) // 2) // unit_tokens


def unit_digest(rows: pa.Table) -> str:
    """sha256 over all that a unit's rows say. rows: of the schema PLAN.

    Parquet hands out a flipped bit without a word, and states of other token ids look like any others.
    """
    digest = hashlib.sha256()
    for name in ("sample_id", "source"):
        digest.update(json.dumps(rows[name].to_pylist()).encode())
    for name in ("line", "unit"):
        digest.update(rows[name].to_numpy())
    for name in ("input_ids", "loss_mask"):
        lists = rows[name].combine_chunks()
        digest.update(pc.list_value_length(lists).to_numpy())
        digest.update(lists.flatten().to_numpy())
    return digest.hexdigest()


class UnitFiles:
    """Samples in, units out: one row group each, `UNITS_PER_FILE` to a file. storage None: units are only counted.

    on_wait: called while the disk is full, which is waited for.
    """

    def __init__(self, storage: Storage | None, unit_tokens: int, on_wait: OnWait | None = None):
        self.storage, self.unit_tokens, self.on_wait = storage, unit_tokens, on_wait
        self.unit, self.paths = -1, set[str]()
        self.largest_tokens = 0  # of a unit
        self._bucket = -1  # of the unit that is being filled
        self._tokens = self._unit_tokens = 0  # of all samples so far, of the unit that is being filled
        self._tables: list[pa.Table] = []
        self._counts: list[list[Any]] = []
        self._file: _ParquetFile | None = None

    def add(self, samples: pa.Table, sizes: np.ndarray) -> None:
        """The samples that come next, in order, and how many tokens each has."""
        buckets = unit_buckets(sizes, self.unit_tokens, self._tokens)
        self._tokens += int(sizes.sum())
        borders = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(sizes)]
        for first, last in pairwise(borders):
            if buckets[first] != self._bucket:
                self._flush()
                self._bucket = int(buckets[first])
            self._tables.append(samples.slice(first, last - first))
            self._unit_tokens += int(sizes[first:last].sum())

    def _flush(self) -> None:
        if not self._tables:
            return
        self.unit += 1
        tokens, self._unit_tokens = self._unit_tokens, 0
        self.largest_tokens = max(self.largest_tokens, tokens)
        if self.storage is None:
            self._tables = []
            return
        table = pa.concat_tables(
            self._tables
        ).combine_chunks()  # pages, and so bytes, must not depend on the chunks of the input
        self._tables = []
        if self._file is None:
            self._file = _ParquetFile(self.storage, PLAN, part_path(self.unit), self.on_wait)
        units = pa.array(np.full(len(table), self.unit, np.int32))
        table = table.append_column(PLAN.field("unit"), units).cast(PLAN)
        self._file.write(table)
        self._counts.append([self.unit, len(table), tokens, unit_digest(table)])
        if len(self._counts) == UNITS_PER_FILE:
            self._publish()

    def _publish(self) -> None:
        if self._file is not None:
            self._file.publish({UNITS_KEY: json.dumps(self._counts)})
            self.paths.add(self._file.path)
        self._file, self._counts = None, []

    def finish(self) -> None:
        self._flush()
        self._publish()

    def __enter__(self) -> "UnitFiles":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()


class RejectFile:
    """`_run/rejected.parquet`: every line that became no sample, in order. storage None: nothing is written."""

    def __init__(self, storage: Storage | None, on_wait: OnWait | None = None):
        self._file = None if storage is None else _ParquetFile(storage, REJECTS, REJECTED, on_wait)
        self._rows: list[Reject] = []

    def add(self, reject: Reject) -> None:
        self._rows.append(reject)
        if len(self._rows) == REJECTS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._file is not None and self._rows:
            self._file.write(pa.Table.from_pylist([asdict(reject) for reject in self._rows], REJECTS))
        self._rows = []

    def finish(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.publish({})

    def __enter__(self) -> "RejectFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()


class _ParquetFile:
    """A file of the plan in the making: each write is one row group; nothing is seen before `publish`.

    A full disk is waited for before each write: one that failed in the middle of a row group could not be made again.
    """

    def __init__(self, storage: Storage, schema: pa.Schema, path: str, on_wait: OnWait | None = None):
        self.storage, self.path, self.on_wait = storage, path, on_wait
        name = f"plan-{uuid.uuid4().hex}.parquet"
        self._scratch = when_there_is_room(lambda: storage.scratch(name), on_wait)
        try:
            self._writer = when_there_is_room(lambda: _writer(self._scratch, schema), on_wait)
        except BaseException:  # also what `on_wait` raises to end the wait
            self._scratch.close()
            raise

    def write(self, table: pa.Table) -> None:
        # Parquet stores a loss mask in 4 bytes a value before it is compressed, and lists with levels of their own.
        self._wait_for_room(2 * table.nbytes)
        self._writer.write_table(table, row_group_size=max(len(table), 1))

    def publish(self, metadata: dict[str, str]) -> None:
        self._wait_for_room(0)
        self._writer.add_key_value_metadata(metadata)
        self._writer.close()
        self._scratch.trim()
        when_there_is_room(lambda: self.storage.publish(self._scratch, self.path), self.on_wait)
        self._scratch.close()

    def _wait_for_room(self, need: int) -> None:
        # Not for output.min_free_bytes as well: the estimate, which comes next, refuses a disk that has too little.
        wait_while(lambda: self._scratch.reserve(need + FOOTER_BYTES, 0), self.on_wait)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: what was to be written is thrown away anyway
            self._writer.close()
        self._scratch.close()


def _writer(scratch: Scratch, schema: pa.Schema) -> pq.ParquetWriter:
    # Statistics and dictionaries are of no use for token ids, and cost more than zstd.
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "write_statistics": False}
    options["write_page_checksum"] = True
    return pq.ParquetWriter(scratch.path, schema, use_dictionary=["source", "code"], **options)
