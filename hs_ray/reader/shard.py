"""One shard file: its rows as numpy arrays and bf16 tensors.

Shapes: S tokens of a row or of a joined sample, H hidden_size.

A state column is one uncompressed, plainly encoded value a row group, so the value is the last `S * H * 2` bytes
of its column chunk, with its length in the four bytes before. Those bytes are read straight into the tensor:
Parquet's own decoder would copy them once more. Anything stored in another way goes through the decoder.
"""

import json
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hs_ray.errors import ConfigError, ShardError
from hs_ray.reader.batch import empty_tensors
from hs_ray.schema import METADATA_KEY, STATE_BYTES, stored_columns
from hs_ray.storage import Storage, raise_outage

SMALL_COLUMNS = ["sample_id", "source", "line", "num_tokens", "sample_tokens", "input_ids", "loss_mask", "token_start"]
LISTS = ("input_ids", "loss_mask")
ALWAYS = ("sample_id", "source", "line", *LISTS)  # in every sample, asked for or not
# What damage makes pyarrow and os raise; an outage may be among it: raise_outage.
READ_ERRORS = (OSError, ValueError, LookupError, OverflowError, pa.ArrowException)
FOOTER: dict[str, type] = {"fingerprint": str, "hidden_size": int, "compression": str, "columns": list}


def chosen_columns(asked: Sequence[str] | str | None, known: Sequence[str], path: str) -> tuple[str, ...]:
    """The state columns to read, None for all; what every sample has besides may be named too. Raises ConfigError."""
    names = [asked] if isinstance(asked, str) else list(known if asked is None else asked)
    unknown = [name for name in names if name not in (*known, *ALWAYS)]
    if unknown:
        raise ConfigError(f"columns = {names}: {unknown} are not in {path}; it has {', '.join(known)}")
    return tuple(name for name in names if name in known)


def join_halves(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """uint8 [n] sign-and-exponent bytes and uint8 [n] mantissa bytes -> uint16 [n], the bf16 bits."""
    bits = np.left_shift(high, 8, dtype=np.uint16, casting="unsafe")
    return np.bitwise_or(bits, low, out=bits)


def cell_bytes(table: pa.Table, column: str) -> np.ndarray:
    """The bytes of a large_binary column of a one-row table, as a uint8 view of Arrow's memory."""
    return np.frombuffer(table.column(column)[0].as_buffer(), dtype=np.uint8)


def decode_state(table: pa.Table, column: str, compression: str) -> np.ndarray:
    """bf16 bits, uint16 [S * H], of a state column of a one-row table. Raises ValueError for halves that do not fit."""
    if compression != "split_zstd":
        return cell_bytes(table, column).view(np.uint16)
    high, low = cell_bytes(table, f"{column}_hi"), cell_bytes(table, f"{column}_lo")
    if len(high) != len(low):
        raise ValueError(f"{column}_hi has {len(high)} bytes, {column}_lo {len(low)}")
    return join_halves(high, low)


class ShardFile:
    """An open shard. `metadata` is the JSON that its footer carries, `num_rows` its rows (one a row group).

    Raises ShardError, naming the file, for anything that is not a shard, and for any row that cannot be read; while its
    disk or store is unwell, the OSError that says so.
    """

    def __init__(self, storage: Storage, path: str):
        self._fd = -1
        local = storage.local_path(path)
        self.name = local or f"{storage.root}/{path}"
        try:
            self._file = storage.open(path)
            self._parquet = pq.ParquetFile(self._file, pre_buffer=local is None)
            schema = self._parquet.schema
            self._number = {schema.column(i).path: i for i in range(len(schema))}
            names = set(self._parquet.schema_arrow.names)
        except READ_ERRORS as error:
            raise_outage(error)
            raise ShardError(f"{self.name}: not a readable Parquet file ({error})") from error
        self.metadata = self._footer()
        self.num_rows: int = self._parquet.num_row_groups
        rows = self._parquet.metadata.num_rows
        if rows != self.num_rows:
            raise ShardError(f"{self.name}: {rows} rows in {self.num_rows} row groups; one row a group is needed")
        self._hidden: int = self.metadata["hidden_size"]
        self._compression: str = self.metadata["compression"]
        missing = set(SMALL_COLUMNS + stored_columns(self.metadata["columns"], self._compression)) - names
        if missing:
            raise ShardError(f"{self.name}: damaged, columns {sorted(missing)} are missing")
        self._samples: list[range] | None = None
        if local is not None:
            self._fd = self._read(lambda: os.open(local, os.O_RDONLY))
            # Datasets are dropped and not closed; pyarrow's own descriptor goes with its object, this one would stay.
            self._close_fd = weakref.finalize(self, os.close, self._fd)

    def _footer(self) -> dict[str, Any]:
        """The JSON in the footer."""
        text = (self._parquet.metadata.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise ShardError(f"{self.name}: a foreign Parquet file, its footer has no {METADATA_KEY.decode()} entry")
        metadata = self._read(lambda: json.loads(text))
        if not isinstance(metadata, dict):
            raise ShardError(f"{self.name}: damaged, what its footer says of it is {metadata!r:.80}")
        wrong = [name for name, kind in FOOTER.items() if not isinstance(metadata.get(name), kind)]
        if wrong:
            raise ShardError(f"{self.name}: damaged, no usable {', '.join(wrong)} in its footer")
        return metadata

    def close(self) -> None:
        self._parquet.close()
        self._file.close()
        if self._fd >= 0:
            self._close_fd()
            self._fd = -1

    def sample_rows(self, samples: int) -> list[range]:
        """The rows of each of the shard's `samples` samples: usually one, several for a sample that was split."""
        if self._samples is None:
            if samples == self.num_rows:
                self._samples = [range(row, row + 1) for row in range(samples)]
            else:
                starts = self._read(lambda: self._parquet.read(columns=["token_start"]).column(0).to_numpy())
                first = np.flatnonzero(starts == 0).tolist() + [self.num_rows]
                if first[0] != 0:
                    raise ShardError(f"{self.name}: damaged, begins in the middle of a sample")
                self._samples = [range(a, b) for a, b in zip(first, first[1:], strict=False)]
            if len(self._samples) != samples:
                raise ShardError(f"{self.name}: {len(self._samples)} samples where {samples} were committed")
        return self._samples

    def sample(self, rows: range, columns: Sequence[str], shared: bool = False) -> dict[str, Any]:
        """One sample out of consecutive rows, joined: int64 input_ids [S], uint8 loss_mask [S], bf16 states [S, H].

        shared: its tensors are views of one storage in shared memory.
        """
        pieces = [self._small_columns(row) for row in rows]
        first, total = pieces[0], pieces[0]["sample_tokens"]
        expected = 0
        for row, piece in zip(rows, pieces, strict=True):
            if piece["sample_id"] != first["sample_id"] or piece["token_start"] != expected:
                told = [{name: one[name] for name in ("sample_id", "num_tokens", "token_start")} for one in pieces]
                raise ShardError(f"{self.name}: rows {rows} do not join to one sample ({told})")
            if piece["num_tokens"] < 1:
                raise ShardError(f"{self.name}: damaged, row {row} has {piece['num_tokens']} tokens")
            expected += piece["num_tokens"]
        ids, mask = (np.concatenate([piece[name] for piece in pieces]) for name in LISTS)
        if not len(ids) == len(mask) == expected == total:
            raise ShardError(
                f"{self.name}: sample {first['sample_id']!r} has {len(ids)} input_ids, {len(mask)} loss_mask, "
                f"{expected} num_tokens, {total} sample_tokens"
            )
        layout = {"input_ids": ((total,), torch.int64), "loss_mask": ((total,), torch.uint8)}
        tensors = empty_tensors(layout | dict.fromkeys(columns, ((total, self._hidden), torch.bfloat16)), shared)
        tensors["input_ids"].numpy()[:], tensors["loss_mask"].numpy()[:] = ids, mask
        for row, piece in zip(rows, pieces, strict=True):
            place = slice(piece["token_start"], piece["token_start"] + piece["num_tokens"])
            self._fill(row, {name: tensors[name][place].view(torch.uint16).numpy() for name in columns})
        return {name: first[name] for name in ("sample_id", "source", "line")} | tensors

    def _small_columns(self, row: int) -> dict[str, Any]:
        """Everything of a row but its states; `input_ids` and `loss_mask` are arrays."""
        table = self._read(lambda: self._parquet.read_row_group(row, SMALL_COLUMNS, use_threads=False))
        cells = self._read(lambda: {name: table.column(name)[0] for name in SMALL_COLUMNS})
        for name, cell in cells.items():
            if not cell.is_valid or (name in LISTS and cell.values.null_count):
                raise ShardError(f"{self.name}: damaged, row {row} has a null in column {name}")
        return self._read(  # a string is decoded only here
            lambda: {n: cell.values.to_numpy() if n in LISTS else cell.as_py() for n, cell in cells.items()}
        )

    def _fill(self, row: int, outs: Mapping[str, np.ndarray]) -> None:
        """Read state columns of one row into uint16 [S, H] arrays, each one contiguous."""
        offsets = self._read(lambda: {name: self._value_offset(row, name, out.nbytes) for name, out in outs.items()})
        plain = {name: offset for name, offset in offsets.items() if offset is not None}
        if self._fd >= 0:
            for name, offset in plain.items():
                self._read_local(row, name, offset, outs[name])
        elif plain:
            self._read_remote(row, plain, outs)
        coded = [name for name in outs if name not in plain]
        if coded:
            stored = stored_columns(coded, self._compression)
            table = self._read(lambda: self._parquet.read_row_group(row, stored, use_threads=False))
            for name in coded:
                state = self._read(lambda name=name: decode_state(table, name, self._compression))
                self._check_length(row, name, state.nbytes, outs[name].nbytes)
                outs[name][:] = state.reshape(outs[name].shape)

    def _value_offset(self, row: int, column: str, nbytes: int) -> int | None:
        """Where the value's bytes begin in the file; None if it is stored in a way that needs the decoder.

        Sizes tell what is uncompressed: pyarrow ends the process (std::terminate) over `chunk.compression` where one
        bit of the footer made it a codec that there is none of.
        """
        if self._compression != "none":
            return None
        chunk = self._parquet.metadata.row_group(row).column(self._number[column])
        size = chunk.total_compressed_size
        if size != chunk.total_uncompressed_size or chunk.has_dictionary_page or chunk.num_values != 1:
            return None
        start = chunk.data_page_offset + size - nbytes
        header = size - nbytes - 4
        return start if start >= 4 and 0 < header < 1024 else None  # another length: let the decoder say so

    def _read_local(self, row: int, column: str, offset: int, out: np.ndarray) -> None:
        prefix = bytearray(4)
        target = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # an array is a buffer
        done = self._read(lambda: os.preadv(self._fd, [prefix, target], offset - 4)) - 4
        while 0 <= done < len(target):  # one call reads at most 2 GiB
            more = self._read(lambda: os.preadv(self._fd, [target[done:]], offset + done))  # noqa: B023  # at once
            if not more:
                break
            done += more
        if done != len(target):
            raise ShardError(f"{self.name}: damaged, ends inside row {row}, column {column}")
        self._check_length(row, column, int.from_bytes(prefix, "little"), len(target))

    def _read_remote(self, row: int, offsets: Mapping[str, int], outs: Mapping[str, np.ndarray]) -> None:
        """One range request for the columns of a row: they lie side by side."""
        start = min(offsets.values()) - 4
        end = max(offset + outs[name].nbytes for name, offset in offsets.items())
        if end - start > sum(outs[name].nbytes for name in offsets) + 2**20 and len(offsets) > 1:
            for name in offsets:  # columns that were not asked for lie between: a request each
                self._read_remote(row, {name: offsets[name]}, outs)
            return
        data = np.frombuffer(self._read(lambda: self._file.read_at(end - start, start)), dtype=np.uint8)
        if len(data) != end - start:
            raise ShardError(f"{self.name}: damaged, ends inside row {row}")
        for name, offset in offsets.items():
            at, flat = offset - start, outs[name].reshape(-1).view(np.uint8)
            self._check_length(row, name, int.from_bytes(data[at - 4 : at].tobytes(), "little"), len(flat))
            flat[:] = data[at : at + len(flat)]

    def _check_length(self, row: int, column: str, found: int, expected: int) -> None:
        if found != expected:
            tokens = expected // (self._hidden * STATE_BYTES)
            raise ShardError(
                f"{self.name}: damaged, row {row}, column {column} has {found} bytes; "
                f"{tokens} tokens * {self._hidden} * {STATE_BYTES} = {expected}"
            )

    def _read(self, read: Any) -> Any:
        try:
            return read()
        except READ_ERRORS as error:
            raise_outage(error)
            raise ShardError(f"{self.name}: damaged ({error})") from error
