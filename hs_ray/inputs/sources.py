"""Which files the input is, what each one holds, and the raw lines of a part of one.

Lines are split on the byte `\\n` and nothing else: `str.splitlines` and text mode also break at U+2028, U+0085 and
`\\r`, which are legal in JSON.
"""

import hashlib
import os
import posixpath
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from hs_ray.config import InputConfig
from hs_ray.errors import HsRayError, InputError, RunError
from hs_ray.inputs.records import Rejected, parse_json, recognise
from hs_ray.storage import is_outage

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
LINE_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*LINE_SUFFIXES, *(f"{s}{c}" for s in LINE_SUFFIXES for c in COMPRESSIONS), ".parquet")
READ_BYTES = 4 * 2**20
MAX_LINE_BYTES = 512 * 2**20  # of a longer line only the first bytes are kept: it is rejected, not held in memory
PEEK_LINES = 100
CHUNK_BYTES = 32 * 2**20
IO_THREADS = 16
DEMO = Path(__file__).parent.parent / "demo"  # what `input.path=null` means
BOM = b"\xef\xbb\xbf"


def unreadable(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What opening and reading raise, and `more`. An S3 store that is not reached raises no OSError but botocore's own.

    That is imported by whoever uses a store: it takes a while, and a machine without stores need not have it.
    """
    botocore, aiohttp = sys.modules.get("botocore.exceptions"), sys.modules.get("aiohttp")
    of_stores = [*([botocore.BotoCoreError] if botocore else []), *([aiohttp.ClientError] if aiohttp else [])]
    return (OSError, pa.ArrowInvalid, *of_stores, *more)


def cannot_be_read(path: str, error: Exception, advice: str = "check the file") -> HsRayError:
    """What to raise: the user is told to mend a file only where something is wrong with it."""
    if is_outage(error):
        return RunError(f"input.path = {path}: cannot be read now ({error}); run the same command again")
    return InputError(f"input.path = {path}: cannot be read ({error}); {advice}")


@dataclass(frozen=True)
class Source:
    """One input file. `source`, relative to the longest common parent of all of them, is what samples are named by."""

    path: str  # as fsspec opens it
    source: str
    size: int
    format: str  # tokens, messages, conversations or text; auto: nothing in the file's head says which
    kind: str  # lines, parquet or arrow
    parts: int = 1  # row groups of a Parquet file


@dataclass(frozen=True)
class Chunk:
    """A part of a source, read by one reader: [start, end) in bytes of a plain file, in row groups of a Parquet file.

    `end` None: to the end. A line belongs to the chunk that holds its first byte: borders need not fall on line ends.
    """

    source: Source
    start: int = 0
    end: int | None = None


def list_sources(config: InputConfig) -> list[Source]:
    """Every file of `input.path` with its format, sorted by `source`: the order they were given in does not matter.

    Raises InputError if a path matches nothing or a file cannot be read, RunError where its disk or store is unwell.
    """
    path = config.path or str(DEMO)
    given = [path] if isinstance(path, str) else list(path)
    found: dict[str, tuple[int, str]] = {}
    for path in given:
        found.update(_expand(str(path)))
    names = _relative_names(list(found))
    with ThreadPoolExecutor(IO_THREADS) as pool:
        sources = list(pool.map(lambda path: _inspect(path, names[path], *found[path], config.format.name), found))
    return sorted(sources, key=lambda source: source.source)


def split_sources(sources: Sequence[Source], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """The chunks of all sources, in order. A compressed file is one: it can be read only from its beginning."""
    chunks: list[Chunk] = []
    for source in sources:
        if source.kind == "lines" and _codec(source.path) is None:
            borders = range(0, max(source.size, 1), chunk_bytes)
            chunks += [Chunk(source, start, min(start + chunk_bytes, source.size)) for start in borders]
        elif source.kind == "parquet":
            groups = max(1, round(source.parts * chunk_bytes / max(source.size, 1)))
            chunks += [
                Chunk(source, start, min(start + groups, source.parts)) for start in range(0, source.parts, groups)
            ]
        else:
            chunks.append(Chunk(source))
    return chunks


def content_digests(sources: Sequence[Source]) -> dict[str, str]:
    """{source: digest of its content}: the ETag on S3, sha256 elsewhere (about a second a GB).

    Raises as `list_sources` does.
    """

    def digest(source: Source) -> str:
        try:
            fs, root = url_to_fs(source.path)
            etag = fs.info(root).get("ETag")
            if etag:
                return f"etag:{etag.strip(chr(34))}:{source.size}"
            with fs.open(root, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except unreadable() as error:
            raise cannot_be_read(source.path, error) from error

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip((source.source for source in sources), pool.map(digest, sources), strict=True))


def _expand(path: str) -> dict[str, tuple[int, str]]:
    """One entry of `input.path` -> {full path: (size, kind)}."""
    try:
        fs, root = url_to_fs(path)
        if fs.isdir(root):
            infos = {name: info for name, info in fs.find(root, detail=True).items() if _wanted(name[len(root) :])}
        elif fs.exists(root):  # before the glob: a file may have [ or * in its name
            infos = {root: fs.info(root)}
        else:
            hidden = posixpath.basename(root).startswith(".")  # as in a shell: * does not match .name
            infos = {name: info for name, info in fs.glob(root, detail=True).items() if info["type"] == "file"}
            infos = {name: infos[name] for name in infos if hidden or not posixpath.basename(name).startswith(".")}
    except unreadable(ValueError, ImportError) as error:
        if isinstance(error, OSError) and is_outage(error):  # one that never answered is more likely misspelt
            raise cannot_be_read(path, error) from error
        raise InputError(
            f"input.path = {path}: cannot be listed ({type(error).__name__}: {error}); check it"
        ) from error
    if not infos:
        raise InputError(
            f"input.path = {path}: no such file, or a folder without input; what is read: {', '.join(SUFFIXES)}, "
            f"folders saved by datasets' save_to_disk"
        )
    remote = "://" in path
    return {fs.unstrip_protocol(name) if remote else name: (info["size"], _kind(name)) for name, info in infos.items()}


def _wanted(relative: str) -> bool:
    """Files of a folder that are input; hidden ones, checksums, logs and datasets' caches are not."""
    parts = relative.strip("/").split("/")
    hidden = any(part.startswith(".") for part in parts) or parts[-1].startswith("cache-")
    return relative.endswith((*SUFFIXES, ".arrow")) and not hidden


def _kind(name: str) -> str:
    bare, suffix = posixpath.splitext(name)
    if suffix in (".parquet", ".arrow"):
        return suffix[1:]
    if (bare if suffix in COMPRESSIONS else name).endswith((*LINE_SUFFIXES, ".json")):
        return "lines"
    raise InputError(f"input.path = {name}: not a kind of file that is read; give {', '.join(SUFFIXES)}")


def _codec(path: str) -> str | None:
    return COMPRESSIONS.get(posixpath.splitext(path)[1])


def _relative_names(paths: list[str]) -> dict[str, str]:
    common = len(os.path.commonprefix([path.split("/")[:-1] for path in paths]))  # of lists: whole folder names
    return {path: "/".join(path.split("/")[common:]) for path in paths}


def _inspect(path: str, source: str, size: int, kind: str, wanted: str) -> Source:
    """Open a file once: the format that its head speaks for, and a Parquet file's row groups."""
    parts = 1
    try:
        source.encode()  # a name of other bytes than UTF-8 fits into no Parquet file
        if kind == "lines":
            seen = _peek(path) if wanted == "auto" else wanted
        else:
            with open_binary(path) as file:
                if kind == "parquet":
                    parquet = pq.ParquetFile(file)
                    parts, names = parquet.num_row_groups, parquet.schema_arrow.names
                else:
                    names = pa.ipc.open_stream(file).schema.names
            seen = recognise(names) or "auto" if wanted == "auto" else wanted
    except unreadable(UnicodeEncodeError) as error:
        raise cannot_be_read(path, error, "check the file, or leave it out") from error
    return Source(path, source, size, seen, kind, parts)


def _peek(path: str) -> str:
    began = False
    for line in islice(read_lines(Chunk(Source(path, "", 0, "auto", "lines"))), PEEK_LINES):
        bare = line.removeprefix(BOM).strip()
        if not began and (bare == b"[" or bare.startswith((b"[{", b"[ {"))):  # further down it is one bad line
            raise InputError(
                f"input.path = {path}: one JSON array, one object a line is needed; convert it: "
                f"jq -c '.[]' {posixpath.basename(path)} > {posixpath.basename(path).split('.')[0]}.jsonl"
            )
        began = began or bool(bare)
        try:
            seen = recognise(parse_json(bare))
        except Rejected:
            continue
        if seen:
            return seen
    return "auto"


def open_binary(path: str) -> Any:
    """A seekable file object; S3 is read ahead in large blocks."""
    fs, root = url_to_fs(path)
    return fs.open(root, "rb", block_size=READ_BYTES)


def read_lines(chunk: Chunk) -> Iterator[bytes]:
    """The lines of a chunk, without their `\\n`. InputError: a damaged compressed file; RunError: an outage."""
    codec = _codec(chunk.source.path)
    try:
        with open_binary(chunk.source.path) as file:
            if codec is not None:
                yield from _split(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec), 0, None, False)
            else:
                # One byte earlier: whether a line begins at `start` is told by the byte before it.
                file.seek(max(chunk.start - 1, 0))
                yield from _split(file, max(chunk.start - 1, 0), chunk.end, chunk.start > 0)
    except unreadable() as error:
        raise cannot_be_read(chunk.source.path, error) from error


def _split(file: Any, offset: int, end: int | None, skip: bool) -> Iterator[bytes]:
    """Lines whose first byte is before `end`; `offset`: where the file stands; `skip`: the first piece is not ours."""
    parts: list[bytes] = []  # of the line that is being read; joined once, or a huge line would be copied over and over
    kept = length = 0
    at_end = False
    while not at_end:
        block = file.read(READ_BYTES)
        at_end = not block
        pieces = block.split(b"\n")
        for i, piece in enumerate(pieces):
            if kept <= MAX_LINE_BYTES and not skip:
                parts.append(piece)
                kept += len(piece)
            length += len(piece)
            if i == len(pieces) - 1 and not (at_end and length):
                break
            if skip:
                skip = False
            elif end is not None and offset >= end:
                return
            else:
                yield b"".join(parts)
            offset += length + 1
            parts, kept, length = [], 0, 0
        if end is not None and (offset + length if skip else offset) >= end:
            return
