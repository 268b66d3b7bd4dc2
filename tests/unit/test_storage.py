"""Storage on a local disk and on S3: the same promises, also while the store is unwell."""

import contextlib
import errno
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from s3 import PART_BYTES, Bucket

from hs_ray.errors import OutputError
from hs_ray.storage import FileInfo, Storage, local, open_storage

BOTH = ["local", pytest.param("s3", marks=pytest.mark.integration)]


@pytest.fixture(params=BOTH)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return request.getfixturevalue("s3").storage()
    return open_storage(str(tmp_path / "runs" / "out"))


def publish(storage: Storage, path: str, data: bytes) -> None:
    scratch = storage.scratch(path.rpartition("/")[2])
    Path(scratch.path).write_bytes(data)
    storage.publish(scratch, path)
    scratch.close()


def test_write_read_list_remove(storage: Storage) -> None:
    assert storage.list("a") == [] and not storage.exists("a/x")
    for name, data in [("a/x", b"1"), ("a/y", b"22"), ("a/b/z", b"333"), ("a/x", b"4444")]:
        storage.write(name, data)
    assert [(i.path, i.size) for i in storage.list("a")] == [("a/x", 4), ("a/y", 2)]
    assert [i.path for i in storage.list("a", "y")] == ["a/y"]
    assert storage.read_many(["a/y", "a/b/z", "a/x"]) == [b"22", b"333", b"4444"]
    assert storage.size("a/b/z") == 3 and storage.exists("a/b/z")
    storage.remove("a/x")
    storage.remove("a/x")  # no error
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("a/x")
    with pytest.raises(FileNotFoundError):
        storage.open("a/x")


def test_create_has_one_winner(storage: Storage) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def race(number: int) -> None:
        start.wait()
        if storage.create("done/x.json", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and storage.read_bytes("done/x.json") == b"%d" % won[0]
    assert storage.create("done/x.json", b"%d" % won[0])  # the winner may ask again: same data, same writer
    assert not storage.create("done/x.json", b"other")


def test_publish_and_open(storage: Storage) -> None:
    data = os.urandom(3 * PART_BYTES + 17)  # four parts
    publish(storage, "shards/x.parquet", data)
    publish(storage, "shards/small.parquet", data[:5])
    assert [(i.path, i.size) for i in storage.list("shards")] == [
        ("shards/small.parquet", 5),
        ("shards/x.parquet", len(data)),
    ]
    with storage.open("shards/x.parquet") as file:
        assert file.size() == len(data)
        assert file.read(10) == data[:10] and file.tell() == 10
        file.seek(PART_BYTES - 5)
        assert file.read(2 * PART_BYTES) == data[PART_BYTES - 5 : 3 * PART_BYTES - 5]  # several ranges at once
        file.seek(-3, os.SEEK_END)
        assert file.read() == data[-3:] and file.read(1) == b""


def test_publishing_again_after_a_folder_that_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may show only when the new name is made durable: the writer waits and publishes again."""
    storage = open_storage(str(tmp_path / "out"))
    storage.write("shards/before", b"")
    scratch = storage.scratch("unit-000001-0001-aa.parquet")
    Path(scratch.path).write_bytes(b"whole")

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(local, "sync_folder", full)
        with pytest.raises(OSError, match="No space"):
            storage.publish(scratch, "shards/x.parquet")
    storage.publish(scratch, "shards/x.parquet")
    scratch.close()
    assert storage.read_bytes("shards/x.parquet") == b"whole" and storage.list("_run/tmp") == []


def test_a_scratch_file_that_is_not_published_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    scratch = storage.scratch("unit-000001-0001-aa.parquet")
    Path(scratch.path).write_bytes(b"half")
    assert storage.list("shards") == []
    mine = os.dup(scratch.fd)  # keeps the inode ours: numbers of closed descriptors and of inodes are given out again
    try:
        assert {mine, scratch.fd} <= descriptors_of(mine)
        scratch.close()
        scratch.close()
        assert storage.list("_run/tmp") == [] and descriptors_of(mine) == {mine}
    finally:
        os.close(mine)


def descriptors_of(fd: int) -> set[int]:
    """The descriptors of this process that have the same file open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since, by another thread
            if os.path.samestat(link.stat(), os.fstat(fd)):
                found.add(int(link.name))
    return found


def test_pickles_and_forks(storage: Storage) -> None:
    """Actors get a storage by pickle; a DataLoader's workers are forks, which s3fs's connection does not survive."""
    storage.write("a", b"1")
    assert pickle.loads(pickle.dumps(storage)).read_bytes("a") == b"1"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if storage.read_bytes("a") == b"1" else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_clock_of_the_store(storage: Storage) -> None:
    storage.write("a", b"")
    assert 0 <= storage.now() - storage.list("")[0].mtime < 2
    assert storage.list("_run/tmp") == []


def test_check_writable_leaves_nothing(storage: Storage) -> None:
    storage.check_writable()
    assert storage.list("_run/tmp") == []


def test_free_bytes(tmp_path: Path) -> None:
    assert (open_storage(str(tmp_path / "not" / "yet")).free_bytes() or 0) > 0


@pytest.mark.parametrize("path", ["gs://b/x", "s3://", "s3:///x"])
def test_refuses_other_places(path: str) -> None:
    with pytest.raises(OutputError, match=r"a local folder, or s3://bucket/prefix"):
        open_storage(path)


def test_local_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=rf"output.path = {tmp_path}/file: cannot write there: Not a directory"):
        open_storage(str(tmp_path / "file")).check_writable()


@pytest.mark.parametrize("syscall", ["fsync", "rename", "open"])
def test_a_failed_local_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syscall: str) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("a/x", b"old")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, syscall, fail)
        with pytest.raises(OSError, match="No space left"):
            storage.write("a/x", b"new")
    assert storage.read_bytes("a/x") in (b"old", b"new")  # `open` fails after the rename, at the folder's fsync
    assert storage.list("_run/tmp") == []


# --- S3 that is unwell ---

DATA = b"u" * 3 * PART_BYTES
STEPS: dict[str, tuple[str, Callable[[Storage], object]]] = {  # request to break, and what needs it
    "put": ("PUT /.*/put$", lambda s: s.write("put", b"new")),
    "create": ("PUT /.*/create$", lambda s: s.create("create", b"mine")),
    "get": ("GET /.*/get$", lambda s: s.read_bytes("get")),
    "list": ("GET /.*prefix=.*listed", lambda s: [info.path for info in s.list("listed")]),
    "remove": ("DELETE /.*/remove$", lambda s: s.remove("remove")),
    "begin": (r"POST /.*begin\?uploads", lambda s: publish(s, "shards/begin", DATA)),
    "part": ("PUT /.*part.*partNumber=2", lambda s: publish(s, "shards/part", DATA)),
    "complete": ("POST /.*complete.*uploadId", lambda s: publish(s, "shards/complete", DATA)),
    "head": ("HEAD /.*/shards/head", lambda s: publish(s, "shards/head", DATA)),
}


@pytest.mark.integration
@pytest.mark.parametrize("action", ["status", "before", "during", "after", "cut"])
def test_transient_faults_are_ridden_out(s3: Bucket, action: str) -> None:
    """Every kind of request, each broken twice, all at once from as many threads."""
    storage = s3.storage()
    for name in ("get", "listed/x", "remove"):
        s3.put(name, b"0123456789")
    faults = {step: s3.fault(pattern, action, times=2) for step, (pattern, _) in STEPS.items()}
    with ThreadPoolExecutor(len(STEPS)) as pool:
        futures = {step: pool.submit(act, storage) for step, (_, act) in STEPS.items()}
    results = {step: future.result() for step, future in futures.items()}
    without_body = {"put", "create", "part", "head", "remove"} if action == "cut" else set()  # nothing to cut there
    assert {step for step, fault in faults.items() if fault.times} == without_body
    assert (results["create"], results["get"], results["list"]) == (True, b"0123456789", ["listed/x"])
    assert storage.read_many(["put", "create"]) == [b"new", b"mine"] and not storage.exists("remove")
    assert [(i.path, i.size) for i in storage.list("shards")] == [
        (f"shards/{step}", len(DATA)) for step in ("begin", "complete", "head", "part")
    ]
    storage.abort_incomplete_uploads()  # a lost answer to `begin` leaves one
    assert s3.uploads() == 0


@pytest.mark.integration
@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (400, "RequestTimeout")])
def test_errors_worth_another_try(s3: Bucket, status: int, code: str) -> None:
    storage = s3.storage()
    s3.fault("PUT", "status", times=2, status=status, code=code)
    storage.write("a", b"1")
    assert storage.read_bytes("a") == b"1"


@pytest.mark.integration
def test_a_hanging_request_times_out_and_is_tried_again(s3: Bucket) -> None:
    storage = s3.storage(config_kwargs={"read_timeout": 0.5})
    s3.fault("PUT", "hang", seconds=1.5)
    storage.write("a", b"1")
    assert storage.read_bytes("a") == b"1"


@pytest.mark.integration
def test_gives_up_with_the_reason(s3: Bucket) -> None:
    storage = s3.storage(retry_seconds=0.5)
    s3.fault("PUT", "status", times=100)
    with pytest.raises(OSError, match=r"a: put_object: still failing after .*SlowDown"):
        storage.write("a", b"1")


@pytest.mark.integration
def test_a_failed_upload_leaves_nothing(s3: Bucket) -> None:
    storage = s3.storage(retry_seconds=0)
    s3.fault("PUT /.*partNumber=3", "status")
    with pytest.raises(OSError, match="upload_part"):
        publish(storage, "shards/u", b"u" * 4 * PART_BYTES)
    assert storage.list("shards") == [] and s3.uploads() == 0


@pytest.mark.integration
def test_uploads_of_dead_attempts_are_aborted(s3: Bucket) -> None:
    """Not those of an output below this one: it may be in the making."""
    ours = s3.storage(retry_seconds=0)
    below = open_storage(f"{s3.url}/second", s3.options | {"retry_seconds": 0})
    abort = s3.fault("DELETE /", "before", times=99)  # as if the process died: the abort does not arrive either
    for storage in (ours, below):
        # aiohttp itself tries a reused connection once more
        part = s3.fault("PUT /.*partNumber=3", "before", times=2)
        with pytest.raises(OSError, match="upload_part"):
            publish(storage, "shards/u", b"u" * 4 * PART_BYTES)
        part.times = 0
    abort.times = 0
    assert s3.uploads() == 2
    assert s3.storage().abort_incomplete_uploads() == 1 and s3.uploads() == 1
    assert below.abort_incomplete_uploads() == 1 and s3.uploads() == 0


@pytest.mark.integration
@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (404, "NoSuchBucket")])
def test_a_refusal_is_found_before_the_run(s3: Bucket, status: int, code: str) -> None:
    storage = s3.storage()
    s3.fault("PUT", "status", times=100, status=status, code=code)
    with pytest.raises(OutputError, match=rf"output.path = {s3.url}: cannot write there: .*{code}"):
        storage.check_writable()
    assert len(s3.requests) == 1  # not tried again


@pytest.mark.integration
def test_no_credentials(s3: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(OutputError, match="AWS_ACCESS_KEY_ID"):
        s3.storage(config_kwargs={"read_timeout": 59}).check_writable()  # a connection that no test has made yet


@pytest.mark.integration
def test_a_store_without_exclusive_creation_is_refused(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = s3.storage()
    monkeypatch.setattr(storage, "create", lambda path, data: storage.write(path, data) or True)
    with pytest.raises(OutputError, match="ignores If-None-Match"):
        storage.check_writable()


@pytest.mark.integration
def test_requests_are_few(s3: Bucket) -> None:
    storage = s3.storage()
    for number in range(2500):
        s3.put(f"done/unit-{number:06d}.json", b"{}")
    s3.requests.clear()
    found = storage.list("done")
    assert len(found) == 2500 and isinstance(found[0], FileInfo) and len(s3.requests) == 3


@pytest.mark.integration
def test_parts_carry_checksums(s3: Bucket) -> None:
    """S3 then refuses a part that was damaged on the way; botocore sends CRC32 unless told otherwise."""
    seen = s3.record_headers("PUT")
    publish(s3.storage(), "shards/u", DATA)
    assert seen.count("x-amz-checksum-crc32") == 3


def test_room_for_a_row_is_room_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken beyond it is a convenience: an output that fits must not wait for it."""
    scratch = open_storage(str(tmp_path)).scratch("x")
    free = SimpleNamespace(f_bavail=1000, f_frsize=1)
    monkeypatch.setattr("hs_ray.storage.scratch.os.fstatvfs", lambda fd: free)
    assert scratch.reserve(600, min_free=400) is None
    assert "1000 bytes free, needs 700 and 400 to spare" in str(scratch.reserve(700, min_free=400))
    scratch.close()
