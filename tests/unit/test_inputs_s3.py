"""Input from S3: a file, a list, a glob, a folder; plain, gzip and zstd. Endpoint and keys from the environment."""

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pytest
import zstandard
from s3 import Bucket

from hs_ray.config import InputConfig
from hs_ray.errors import InputError, RunError
from hs_ray.inputs import TokenizeSettings, content_digests, list_sources, read_chunk, split_sources
from hs_ray.inputs.read import SAMPLE

SETTINGS = TokenizeSettings(vocab_size=1000, max_seq_len=50)
FILES = {"1.jsonl": 30, "2.jsonl.gz": 20, "b/3.jsonl.zst": 10}
PACK = {"gz": gzip.compress, "zst": zstandard.compress, "jsonl": bytes}


@pytest.fixture
def root(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """s3://.../in with FILES, and beside them what is not input."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # a connection keeps the endpoint it was made with
    for name, lines in FILES.items():
        records = [{"id": f"{name}:{i}", "input_ids": [i, i + 1]} for i in range(lines)]
        data = "\n".join(map(json.dumps, records)).encode()
        s3.put(f"in/{name}", PACK[name.rpartition(".")[2]](data))
    for name in ("_SUCCESS", ".hidden.jsonl", "b/notes.txt"):
        s3.put(f"in/{name}", b"not input")
    yield f"{s3.url}/in"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def read(path: Any, chunk_bytes: int = 2**20) -> dict[str, int]:
    """{source: samples}; ids show that each line came once and whole."""
    found = {}
    for source in list_sources(InputConfig(path=path)):
        table = pa.concat_tables([read_chunk(chunk, SETTINGS) for chunk in split_sources([source], chunk_bytes)])
        assert set(table["kind"].to_pylist()) == {SAMPLE}
        assert [name.rpartition(":")[2] for name in table["sample_id"].to_pylist()] == [*map(str, range(len(table)))]
        assert table["input_ids"].to_pylist() == [[i, i + 1] for i in range(len(table))]
        found[source.source] = len(table)
    return found


def test_a_folder(root: str) -> None:
    assert read(root) == read(f"{root}/") == read(root, chunk_bytes=100) == FILES


@pytest.mark.parametrize("name", FILES)
def test_one_file(root: str, name: str) -> None:
    assert read(f"{root}/{name}", chunk_bytes=64) == {name.rpartition("/")[2]: FILES[name]}


def test_globs(root: str) -> None:
    assert read(f"{root}/*.jsonl*") == {"1.jsonl": 30, "2.jsonl.gz": 20}
    assert read(f"{root}/**/*.zst") == {"3.jsonl.zst": 10}


def test_a_list_in_any_order(root: str) -> None:
    paths = [f"{root}/{name}" for name in FILES]
    assert read(paths) == read(paths[::-1]) == FILES
    assert list(read([f"{root}/*.gz", paths[0], f"{root}/b"])) == ["1.jsonl", "2.jsonl.gz", "b/3.jsonl.zst"]


def test_digests_are_etags_and_read_nothing(root: str, s3: Bucket) -> None:
    sources = list_sources(InputConfig(path=root))
    s3.requests.clear()
    digests = content_digests(sources)
    assert list(digests) == list(FILES) and all(digest.startswith("etag:") for digest in digests.values())
    assert [line for line in s3.requests if line.startswith("GET") and "list-type" not in line] == []


def test_what_is_not_there(root: str) -> None:
    for path in (f"{root}/none.jsonl", f"{root}/*.none", "s3://no-such-bucket/x.jsonl"):
        with pytest.raises(InputError, match=r"input\.path = s3://"):
            list_sources(InputConfig(path=path))


def test_a_damaged_gzip(root: str, s3: Bucket) -> None:
    s3.put("in/bad.jsonl.gz", gzip.compress(b'{"input_ids": [1, 2]}\n' * 100_000)[:-100])
    with pytest.raises(InputError, match=r"input\.path = s3://.*bad\.jsonl\.gz: cannot be read"):
        read(f"{root}/bad.jsonl.gz")


def test_a_store_that_is_not_reached(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start and, where it goes away, in the middle: one message, and no error of botocore's own.

    What answered once is not misspelt: then nothing is to be changed, and the job may be tried again.
    """
    [source] = list_sources(InputConfig(path=f"{root}/1.jsonl"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own pauses between tries
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(InputError, match=r"input\.path = s3://.*1\.jsonl: cannot be listed \(EndpointConnection"):
            list_sources(InputConfig(path=f"{root}/1.jsonl"))
        for reads in (lambda: read_chunk(split_sources([source])[0], SETTINGS), lambda: content_digests([source])):
            with pytest.raises(
                RunError, match=r"input\.path = s3://.*1\.jsonl: cannot be read now \(Could not connect"
            ):
                reads()


@pytest.mark.parametrize("request_", ["HEAD .*1\\.jsonl", "GET .*1\\.jsonl"])
def test_a_store_that_is_unwell(root: str, s3: Bucket, monkeypatch: pytest.MonkeyPatch, request_: str) -> None:
    """It answers, with errors: also at the start nothing is wrong with the input."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own pauses between tries
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    s3.fault(request_, "status", times=999)
    with pytest.raises(
        RunError, match=r"input\.path = s3://.*1\.jsonl: cannot be read now .*run the same command again"
    ):
        list_sources(InputConfig(path=f"{root}/1.jsonl"))
