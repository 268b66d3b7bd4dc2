"""A chunk of a source -> Arrow tables with one row a line, samples, rejects and blank lines alike.

That every line has its row is what makes the count of the plan add up: lines = samples + rejected + blank.
"""

import json
import socket
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hs_ray.errors import ConfigError
from hs_ray.inputs.chat import ChatEncoder
from hs_ray.inputs.records import Rejected
from hs_ray.inputs.samples import SampleParser, TokenizeSettings, Tokens
from hs_ray.inputs.sources import (
    BOM,
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    Chunk,
    cannot_be_read,
    open_binary,
    read_lines,
    unreadable,
)
from hs_ray.model import ModelInfo, load_tokenizer, resolve_model, tokenizer_files_digest

SAMPLE, REJECT, BLANK = 0, 1, 2  # `kind`
LINES = pa.schema(
    [
        pa.field("kind", pa.int8(), nullable=False),
        pa.field("sample_id", pa.string()),  # null: the line gave none
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("code", pa.string()),  # of a reject
        pa.field("message", pa.string()),
    ]
)
SOURCE_KEY = b"hs_ray_source"  # schema metadata: the source's name
MAX_MESSAGE = 500


def read_chunk(chunk: Chunk, settings: TokenizeSettings) -> pa.Table:
    """The lines of a chunk in order, schema LINES. Deterministic. Raises as `read_lines`."""
    return pa.concat_tables(iter_chunk(chunk, settings))


def iter_chunk(chunk: Chunk, settings: TokenizeSettings, table_bytes: int = CHUNK_BYTES) -> Iterator[pa.Table]:
    """`read_chunk` in tables of about `table_bytes` of input, at least one: a file may be far larger than memory."""
    parser = SampleParser(chunk.source.format, settings, lambda: _encoder(settings))
    items = _lines(chunk, parser) if chunk.source.kind == "lines" else _records(chunk, parser)
    builder = _TableBuilder(chunk.source.source)
    lines = size = 0
    for item, item_bytes in items:
        builder.add(item)
        lines, size = lines + 1, size + item_bytes
        if size >= table_bytes:
            yield builder.finish()
            builder, size = _TableBuilder(chunk.source.source), 0
        if lines == settings.limit:
            break
    if size or lines == 0 or builder.kinds:
        yield builder.finish()


Item = Tokens | Rejected | None  # None: a blank line


def _lines(chunk: Chunk, parser: SampleParser) -> Iterator[tuple[Item, int]]:
    """(what a line became, its bytes)."""
    for line in read_lines(chunk):
        bare = line.removeprefix(BOM)  # also in the middle of a file: files with a BOM get concatenated
        if not bare.strip():
            yield None, len(line)
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                raise Rejected("line_too_long", f"over {MAX_LINE_BYTES >> 20} MiB")
            item: Item = parser.parse_line(bare)
        except Rejected as error:
            item = error
        yield item, len(line)


def _records(chunk: Chunk, parser: SampleParser) -> Iterator[tuple[Item, int]]:
    """The rows of a Parquet or Arrow file; `line` is the row's number."""
    try:
        with open_binary(chunk.source.path) as file:
            for batch in _batches(file, chunk):
                row_bytes = max(1, batch.nbytes // max(batch.num_rows, 1))
                for row in _rows(batch):
                    try:
                        item: Item = parser.parse_record(row)
                    except Rejected as error:
                        item = error
                    yield item, row_bytes
    except unreadable() as error:
        raise cannot_be_read(chunk.source.path, error) from error


def _batches(file: Any, chunk: Chunk) -> Iterator[pa.RecordBatch]:
    if chunk.source.kind == "arrow":
        yield from pa.ipc.open_stream(file)
        return
    groups = list(range(chunk.start, chunk.source.parts if chunk.end is None else chunk.end))
    yield from pq.ParquetFile(file).iter_batches(batch_size=256, row_groups=groups) if groups else ()


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows as the JSON parser would give them; lists of numbers as arrays."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        flat = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if flat and pa.types.is_primitive(column.type.value_type):
            columns[name] = [None if not item.is_valid else _array(item.values) for item in column]
        else:
            columns[name] = [_without_nulls(value) for value in column.to_pylist()]
    for i in range(batch.num_rows):
        yield {name: values[i] for name, values in columns.items() if values[i] is not None}


def _array(values: pa.Array) -> Any:
    """A list with a null in it stays a list, which the checks refuse."""
    return values.to_pylist() if values.null_count else values.to_numpy(zero_copy_only=False)


def _without_nulls(value: Any) -> Any:
    """A struct column gives every row all keys; those that are null were not in the record."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class _TableBuilder:
    def __init__(self, source: str):
        self.source = source
        self.kinds: list[int] = []
        self.ids: list[str | None] = []
        self.tokens: list[np.ndarray] = []
        self.masks: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.truncated: list[bool] = []
        self.codes: list[str | None] = []
        self.messages: list[str | None] = []

    def add(self, item: Item) -> None:
        if isinstance(item, Tokens):
            self.tokens.append(item.input_ids)
            self.masks.append(item.loss_mask)
        self.kinds.append(SAMPLE if isinstance(item, Tokens) else REJECT if item else BLANK)
        self.lengths.append(len(item.input_ids) if isinstance(item, Tokens) else 0)
        self.truncated.append(isinstance(item, Tokens) and item.truncated)
        self.ids.append(item.sample_id if item else None)
        self.codes.append(item.code if isinstance(item, Rejected) else None)
        self.messages.append(item.message[:MAX_MESSAGE] if isinstance(item, Rejected) else None)

    def finish(self) -> pa.Table:
        offsets = pa.array(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int32))
        columns = [
            pa.array(self.kinds, pa.int8()),
            pa.array(self.ids, pa.string()),
            pa.ListArray.from_arrays(offsets, np.concatenate([*self.tokens, np.empty(0, np.int32)])),
            pa.ListArray.from_arrays(offsets, np.concatenate([*self.masks, np.empty(0, np.uint8)])),
            pa.array(self.truncated, pa.bool_()),
            pa.array(self.codes, pa.string()),
            pa.array(self.messages, pa.string()),
        ]
        return pa.Table.from_arrays(columns, schema=LINES.with_metadata({SOURCE_KEY: self.source.encode()}))


_encoders: dict[str, ChatEncoder] = {}  # of this process: chunk after chunk needs the same one


def _encoder(settings: TokenizeSettings) -> ChatEncoder:
    key = json.dumps([astuple(settings.model), settings.template, settings.tokenizer_digest])
    if key not in _encoders:
        info = resolve_model(settings.model, weights=False)
        _check_tokenizer(info, settings)
        tokenizer = load_tokenizer(info, replace(settings.model, chat_template=None))
        if settings.template is not None:
            tokenizer.chat_template = settings.template
        _encoders[key] = ChatEncoder(tokenizer)
    return _encoders[key]


def _check_tokenizer(info: ModelInfo, settings: TokenizeSettings) -> None:
    """Raises ConfigError where this node's copy is another: its ids and masks would look like any others."""
    if settings.tokenizer_digest in (None, tokenizer_files_digest(info)):
        return
    model = settings.model
    what = f"model.tokenizer = {model.tokenizer}" if model.tokenizer else f"model.path = {model.path}"
    raise ConfigError(
        f"{what}: the tokenizer in {info.tokenizer_path} on node {socket.gethostname()} differs from the driver's; "
        "give that node the same files (a hub's: remove that node's cached copy)"
    )
