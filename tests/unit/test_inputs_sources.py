"""Which files are input, under which name, in which format; Parquet and saved datasets; damaged files."""

import errno
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from test_inputs_lines import SETTINGS, T, outcomes, read, rejected, sample, t, write

from hs_ray.config import InputConfig, InputFormat
from hs_ray.errors import InputError, RunError
from hs_ray.inputs import Chunk, Source, content_digests, list_sources, read_chunk, split_sources


def names(*paths: str) -> list[str]:
    return [source.source for source in list_sources(InputConfig(path=list(paths)))]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b/2.jsonl",
        "a/1.jsonl",
        "a/x.jsonl.gz",
        "a/y.jsonl.zst",
        "a/.hidden.jsonl",
        "a/notes.txt",
        "a/_SUCCESS",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = (
            gzip.compress(T)
            if name.endswith("gz")
            else pa.compress(T, "zstd", asbytes=True)
            if name.endswith("zst")
            else T
        )
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_a_file_is_named_by_its_own_name(tree: Path) -> None:
    assert names(f"{tree}/a/1.jsonl") == ["1.jsonl"]


def test_a_folder_holds_the_files_below_it(tree: Path) -> None:
    assert names(str(tree)) == ["a/1.jsonl", "a/x.jsonl.gz", "a/y.jsonl.zst", "b/2.jsonl"]
    assert names(f"{tree}/a/") == ["1.jsonl", "x.jsonl.gz", "y.jsonl.zst"]


def test_globs_lists_and_order(tree: Path) -> None:
    assert names(f"{tree}/*/*.jsonl") == ["a/1.jsonl", "b/2.jsonl"]
    assert names(f"{tree}/**/*.jsonl") == ["a/1.jsonl", "b/2.jsonl"]
    assert names(f"{tree}/b/2.jsonl", f"{tree}/a/1.jsonl") == names(f"{tree}/a/1.jsonl", f"{tree}/b/2.jsonl")
    assert names(f"{tree}/a/1.jsonl", f"{tree}/a", f"{tree}/a/*.gz") == ["1.jsonl", "x.jsonl.gz", "y.jsonl.zst"]


def test_a_relative_path_names_the_same(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert names("a/1.jsonl", "b") == ["a/1.jsonl", "b/2.jsonl"]


def test_the_common_parent_is_whole_folders(tmp_path: Path) -> None:
    for name in ("abc", "abd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jsonl").write_bytes(T)
    assert names(f"{tmp_path}/abc", f"{tmp_path}/abd") == ["abc/1.jsonl", "abd/1.jsonl"]


def test_a_name_with_glob_characters(tmp_path: Path) -> None:
    assert names(write(tmp_path, T, "a[1]*.jsonl")) == ["a[1]*.jsonl"]


MISSING = [
    ("none.jsonl", "no such file"),
    ("*.none", "no such file"),
    ("empty", "no such file"),
    ("a.txt", "not a kind of file"),
]


@pytest.mark.parametrize(("name", "says"), MISSING)
def test_nothing_to_read(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path, T, "a.txt")
    with pytest.raises(InputError, match=f"input.path = .*{says}"):
        names(f"{tmp_path}/{name}")


def test_a_json_array_says_how_to_convert_it(tmp_path: Path) -> None:
    for data in (b'[{"input_ids":[1]}]', b'[\n{"input_ids":[1]}\n]'):
        with pytest.raises(InputError, match=r"one JSON array.*jq -c"):
            names(write(tmp_path, data, "a.json"))


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.jsonl")).write_bytes(T)
    with pytest.raises(InputError, match="cannot be read"):
        names(str(tmp_path))


def test_no_path_is_the_demo() -> None:
    [source] = list_sources(InputConfig())
    assert source.path.endswith("hs_ray/demo/samples.jsonl")


FORMATS = [
    (b'{"input_ids":[1]}', "tokens"),
    (b'{"id":1,"messages":[]}', "messages"),
    (b'{"conversations":[]}', "conversations"),
    (b'{"text":"a"}', "text"),
    (b'{"prompt":"a","completion":"b"}', "text"),
    (b'{"text":"a","messages":[]}', "messages"),
    (b'{"messages":[],"input_ids":[]}', "tokens"),
    (b'\xef\xbb\xbf{"text":"a"}', "text"),
    (b'\n\nrubbish\n\xff\n{"a":1}\n{"text":"a"}', "text"),
    (b"", "auto"),
    (b"rubbish", "auto"),
]


@pytest.mark.parametrize(("data", "want"), FORMATS)
def test_auto(tmp_path: Path, data: bytes, want: str) -> None:
    path = write(tmp_path, data)
    assert [source.format for source in list_sources(InputConfig(path=path))] == [want]
    assert [s.format for s in list_sources(InputConfig(path=path, format=InputFormat.text))] == ["text"]


def test_each_file_has_its_own_format(tmp_path: Path) -> None:
    write(tmp_path, T, "1.jsonl")
    write(tmp_path, b'{"text":"a"}', "2.jsonl")
    assert [source.format for source in list_sources(InputConfig(path=str(tmp_path)))] == ["tokens", "text"]


CHECKED = zstandard.ZstdCompressor(write_checksum=True)
DAMAGED = {"a.jsonl.gz": gzip.compress(T * 1000), "a.jsonl.zst": CHECKED.compress(os.urandom(10_000))}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_compressed_file_ends_the_job(tmp_path: Path, name: str) -> None:
    """Lines that cannot be counted cannot be accounted for."""
    for data in (DAMAGED[name][:-20], b"plain text", DAMAGED[name][:20] + b"\x00" * 8 + DAMAGED[name][28:]):
        with pytest.raises(InputError, match=r"cannot be read"):
            read(write(tmp_path, data, name))


class Unwell(io.RawIOBase):
    """An open file whose disk fails."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def tell(self) -> int:
        return 1000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_disk_that_is_unwell_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Exit code 1: the same command may do, and `submit` may try it."""
    kind = name.split(".")[1] if name.endswith(("parquet", "arrow")) else "lines"
    write(tmp_path, T, name)
    source = Source(str(tmp_path / name), name, len(T), "tokens", kind)
    for module in ("read", "sources"):
        monkeypatch.setattr(f"hs_ray.inputs.{module}.open_binary", lambda path: Unwell())
    with pytest.raises(RunError, match=rf"input\.path = .*{name}: cannot be read now .*run the same command again"):
        read_chunk(Chunk(source, 0, 1), SETTINGS)


def test_a_file_that_we_may_not_read_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("hs_ray.inputs.sources.open_binary", refuse)
    with pytest.raises(InputError, match=r"cannot be read \(.*Permission denied\); check the file"):
        names(write(tmp_path, T, "a.jsonl"))


def test_digests_follow_the_content(tmp_path: Path) -> None:
    def digests() -> dict[str, str]:
        return content_digests(list_sources(InputConfig(path=str(tmp_path))))

    write(tmp_path, T, "1.jsonl")
    write(tmp_path, T + b"\n", "2.jsonl")
    first = digests()
    assert set(first) == {"1.jsonl", "2.jsonl"} and first["1.jsonl"] != first["2.jsonl"]
    os.utime(tmp_path / "1.jsonl", (0, 0))
    assert digests() == first
    write(tmp_path, T.replace(b"1", b"3"), "1.jsonl")
    assert digests() != first


ROWS: list[dict[str, Any]] = [
    {"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"id": "b", "input_ids": [1, 2], "loss_mask": None},
    {"id": "c", "input_ids": [], "loss_mask": None},
    {"id": "d", "input_ids": [1, None], "loss_mask": None},
    {"id": None, "input_ids": None, "loss_mask": None},
    {"id": "f", "input_ids": [1, 100], "loss_mask": [1, 1]},
    {"id": "g", "input_ids": [1, 2], "loss_mask": [1]},
]
WANT = [
    sample("a", [1, 2, 3], [0, 1, 1]),
    sample("b", [1, 2]),
    rejected("empty", "c"),
    rejected("wrong_type", "d"),
    rejected("missing_key"),
    rejected("token_out_of_range", "f"),
    rejected("mask_length", "g"),
]


@pytest.mark.parametrize("ids", [pa.int32(), pa.int64(), pa.uint16(), pa.uint64()], ids=str)
@pytest.mark.parametrize("mask", [pa.uint8(), pa.int64(), pa.bool_()], ids=str)
def test_parquet(tmp_path: Path, ids: pa.DataType, mask: pa.DataType) -> None:
    rows = [
        row
        | {"loss_mask": row["loss_mask"] and [pa.scalar(x, pa.int64()).cast(mask).as_py() for x in row["loss_mask"]]}
        for row in ROWS
    ]
    schema = pa.schema([("id", pa.string()), ("input_ids", pa.list_(ids)), ("loss_mask", pa.large_list(mask))])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "a.parquet", row_group_size=2)
    [source] = list_sources(InputConfig(path=f"{tmp_path}/a.parquet"))
    assert source.format == "tokens" and source.parts == 4
    for chunk_bytes in (1, 2**30):
        chunks = split_sources([source], chunk_bytes)
        assert [row for chunk in chunks for row in outcomes(read_chunk(chunk, SETTINGS))] == WANT
    assert len(split_sources([source], 1)) == 4


def test_parquet_of_floats(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1.0, 2.0]]}), tmp_path / "a.parquet")
    assert read(f"{tmp_path}/a.parquet") == [rejected("wrong_type")]


def test_parquet_ids_of_64_bits(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": pa.array([2**63 - 1, 2**53 + 1]), "input_ids": [[1, 2], [1, 2]]}), tmp_path / "a.parquet"
    )
    assert read(f"{tmp_path}/a.parquet") == [sample(str(2**63 - 1), [1, 2]), sample(str(2**53 + 1), [1, 2])]


def test_damaged_parquet(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"input.path = .*a\.parquet: cannot be read"):
        read(write(tmp_path, b"PAR1 not really", "a.parquet"))


def test_a_saved_dataset(tmp_path: Path) -> None:
    """`save_to_disk`, a dictionary of splits; a struct column gives every message every key."""
    datasets = pytest.importorskip("datasets")
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": "R"}]
    rows = datasets.Dataset.from_list([{"id": i, "messages": messages} for i in range(3)])
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path))
    sources = list_sources(InputConfig(path=str(tmp_path)))
    assert [(s.format, s.kind, s.source.split("/")[0]) for s in sources] == [
        ("messages", "arrow", "test"),
        ("messages", "arrow", "train"),
    ]
    rows.map(lambda row: {"input_ids": [1, 2]}, remove_columns="messages").save_to_disk(str(tmp_path / "tokens"))
    assert read(f"{tmp_path}/tokens") == [sample(str(i), [1, 2]) for i in range(3)]


def test_null_keys_of_structs_are_not_there(tmp_path: Path) -> None:
    from hs_ray.inputs.read import _rows

    table = pa.Table.from_pylist(
        [
            {"messages": [{"role": "user", "content": "Q", "x": None}]},
            {"messages": [{"role": "a", "content": None, "x": 1}]},
        ]
    )
    [batch] = table.to_batches()
    assert list(_rows(batch)) == [
        {"messages": [{"role": "user", "content": "Q"}]},
        {"messages": [{"role": "a", "x": 1}]},
    ]


def test_tokens_are_the_same_in_every_kind_of_file(tmp_path: Path) -> None:
    lines = b"\n".join(json.dumps({"input_ids": [1, 2]}).encode() for _ in range(5))
    for name, data in (
        ("a.jsonl", lines),
        ("a.ndjson", lines),
        ("a.json", lines),
        ("b.jsonl.gz", gzip.compress(lines)),
    ):
        assert read(write(tmp_path, data, name)) == [t] * 5
