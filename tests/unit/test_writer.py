"""States -> shard -> marker: what is written, and that nothing partial is ever visible, whatever fails when."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import commit
import numpy as np
import pyarrow.parquet as pq
import pytest
from commit import (
    FINGERPRINT,
    SPEC,
    SYSTEM_CALLS,
    TOKENS,
    FaultyStorage,
    Injected,
    attempt,
    check_nothing_partial,
    finish,
    make_sample,
    make_writer,
    stats_of,
    subfolder,
)
from s3 import Bucket

from hs_ray import schema
from hs_ray.errors import CaptureError, LostLeaseError, OutputError
from hs_ray.lease import Lease
from hs_ray.manifest import clean_leftovers, read_markers
from hs_ray.schema import ColumnStats, Marker
from hs_ray.storage import Storage, open_storage, room, scratch

S3 = pytest.param("s3", marks=pytest.mark.integration)


@pytest.fixture(params=["local", S3])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return request.getfixturevalue("s3").storage(retry_seconds=0)
    return open_storage(str(tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


# --- what is in a shard ---


def test_a_shard_holds_every_bit(storage: Storage) -> None:
    marker = attempt(storage, 3, "0001-0000000a")
    assert marker == Marker.from_json(storage.read_bytes("_run/done/unit-000003.json"))
    assert (marker.shard, marker.epoch, marker.engine) == ("shards/unit-000003-0001-0000000a.parquet", 1, "engine 0")
    assert [reject.sample_id for reject in marker.failed] == ["s99"]
    assert marker.columns["hidden_4"] == ColumnStats(rows=2 * TOKENS, absmax=1.0)
    check_nothing_partial(storage)
    with storage.open(marker.shard) as file:
        parquet = pq.ParquetFile(file)
        said = json.loads(parquet.schema_arrow.metadata[b"hs_ray"])
        rows = parquet.read().to_pylist()
    assert said["layers"][0]["id"] == 2 and (said["unit"], said["attempt"]) == (3, "0001-0000000a")
    for number, row in enumerate(rows):
        sample, states = make_sample(number)
        assert (row["sample_id"], row["source"], row["line"], row["token_start"]) == (
            f"s{number}",
            "train.jsonl",
            number,
            0,
        )
        assert row["num_tokens"] == row["sample_tokens"] == TOKENS
        assert row["input_ids"] == sample.input_ids.tolist() and row["loss_mask"] == sample.loss_mask.tolist()
        for name, state in zip(SPEC.columns, states, strict=True):
            assert row[name] == state.tobytes()


def test_layout_of_the_file(local: Storage, tmp_path: Path) -> None:
    marker = attempt(local, 0, "0001-0000000a")
    metadata = pq.ParquetFile(tmp_path / str(marker.shard)).metadata
    columns = {metadata.row_group(0).column(i).path_in_schema: metadata.row_group(0).column(i) for i in range(11)}
    assert metadata.num_row_groups == 2
    assert not columns["hidden_2"].is_stats_set and columns["sample_id"].is_stats_set
    assert not any(column.has_dictionary_page for column in columns.values())
    assert {column.compression for column in columns.values()} == {"UNCOMPRESSED"}


def test_split_zstd(local: Storage, tmp_path: Path) -> None:
    shard_writer = make_writer(local, 0, "0001-0000000a", compression="split_zstd")
    sample, states = make_sample(1)
    shard_writer.add(sample, states, stats_of(states))
    marker = shard_writer.commit("e", 0)
    file = pq.ParquetFile(tmp_path / str(marker.shard))
    row = file.read().to_pylist()[0]
    for name, state in zip(SPEC.columns, states, strict=True):
        both = np.stack([np.frombuffer(row[name + half], np.uint8) for half in ("_lo", "_hi")], axis=1)
        assert both.tobytes() == state.tobytes()
    codecs = {file.metadata.row_group(0).column(i).path_in_schema: file.metadata.row_group(0).column(i).compression
              for i in range(file.metadata.num_columns)}  # fmt: skip
    assert {name for name, codec in codecs.items() if codec == "ZSTD"} == {f"{name}_hi" for name in SPEC.columns}
    assert set(codecs.values()) == {"ZSTD", "UNCOMPRESSED"}


def test_a_long_sample_becomes_several_rows(local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_CELL_BYTES", 300 * SPEC.row_bytes)
    shard_writer = make_writer(local, 0, "0001-0000000a")
    sample, states = make_sample(1)
    shard_writer.add(sample, states, stats_of(states))
    marker = shard_writer.commit("e", 0)
    assert (marker.samples, marker.rows, marker.tokens) == (1, 3, TOKENS)
    rows = pq.ParquetFile(tmp_path / str(marker.shard)).read().to_pylist()
    assert [(r["token_start"], r["num_tokens"], r["sample_tokens"]) for r in rows] == [
        (0, 300, TOKENS), (300, 300, TOKENS), (600, 100, TOKENS)]  # fmt: skip
    assert sum((r["input_ids"] for r in rows), []) == sample.input_ids.tolist()
    for name, state in zip(SPEC.columns, states, strict=True):
        assert b"".join(r[name] for r in rows) == state.tobytes()


def test_arrays_may_be_reused_on_return(local: Storage) -> None:
    """They lie in shared memory that the next sample is captured into."""
    shard_writer = make_writer(local, 3, "0001-0000000a")
    sample, states = make_sample(0)
    shared = [state.copy() for state in states]
    shard_writer.add(sample, shared, stats_of(states))
    for array in [*shared, sample.input_ids, sample.loss_mask]:
        array[:] = 0
    marker = shard_writer.commit("e", 0)
    row = pq.read_table(Path(local.root) / str(marker.shard)).to_pylist()[0]
    assert all(row[name] == state.tobytes() for name, state in zip(SPEC.columns, states, strict=True))
    assert any(row["input_ids"])


def test_a_unit_without_a_sample_has_no_shard(storage: Storage) -> None:
    marker = attempt(storage, 3, "0001-0000000a", samples=0)
    assert (marker.shard, marker.bytes, marker.sha256, len(marker.failed)) == (None, 0, "", 1)
    assert storage.list("shards") == [] and read_markers(storage, FINGERPRINT) == {3: marker}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, st: (s, st[:2]), "2 states, 2 statistics for 3 columns"),
        (lambda s, st: (s, [st[0], st[1][:-1], st[2]]), r"hidden_4 is \[699, 64\], needs \[700, 64\]: 44736 values of"),
        (lambda s, st: (s, [st[0], st[1], st[2].view(np.float16)]), "final_pre_norm is float16"),
        (lambda s, st: (s, [np.asfortranarray(st[0]), st[1], st[2]]), "hidden_2 is uint16, strides"),
        (lambda s, st: (schema.Sample("s0", "x", 1, s.input_ids, s.loss_mask), st), "written twice"),
    ],
)
def test_states_that_do_not_fit_are_refused(local: Storage, change: object, message: str) -> None:
    shard_writer = make_writer(local, 0, "0001-0000000a")
    first, states = make_sample(0)
    shard_writer.add(first, states, stats_of(states))
    sample, states = change(*make_sample(1))  # type: ignore[operator]
    with pytest.raises(CaptureError, match=message):
        shard_writer.add(sample, states, stats_of(states))
    shard_writer.discard()
    assert local.list("_run/tmp") == []


# --- races ---


def test_two_attempts_race(storage: Storage) -> None:
    """Ray may run a task twice at once: one shard, one marker, and both are told of it."""
    start, markers = threading.Barrier(4), []

    def race(name: str) -> None:
        start.wait()
        markers.append(attempt(storage, 7, name))

    threads = [threading.Thread(target=race, args=(f"0001-0000000{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({marker.attempt for marker in markers}) == 1 and len(markers) == 4
    assert [info.path for info in storage.list("shards")] == [markers[0].shard]
    check_nothing_partial(storage)


def test_an_older_epoch_may_not_commit(storage: Storage) -> None:
    Lease.acquire(storage, 60, "old").release()
    shard_writer = make_writer(storage, 7, "0001-00000001", epoch=1)
    sample, states = make_sample(0)
    shard_writer.add(sample, states, stats_of(states))
    Lease.acquire(storage, 60, "new")
    with pytest.raises(LostLeaseError):
        shard_writer.commit("zombie", 0)
    shard_writer.discard()
    assert storage.list("shards") == [] and read_markers(storage, FINGERPRINT) == {}
    assert storage.list("_run/tmp") == []


def test_a_zombie_whose_shard_was_cleared_away_is_overruled(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed its last check just before a new driver came and cleared up; then it makes its marker."""
    original = storage.create

    def late(path: str, data: bytes) -> bool:
        Lease.acquire(storage, 60, "new")
        assert clean_leftovers(storage, 1, read_markers(storage, FINGERPRINT)) >= 1
        return original(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(
            storage, "create", lambda path, data: late(path, data) if "done" in path else original(path, data)
        )
        zombie = attempt(storage, 7, "0001-00000001")
    assert storage.list("shards") == []
    assert read_markers(storage, FINGERPRINT) == {}  # a marker without its shard does not count
    marker = attempt(storage, 7, "0002-00000001", epoch=1)
    assert marker.attempt != zombie.attempt
    finish(storage, 7, epoch=1)


# --- an exception between any two steps ---


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_at_every_step_of_the_commit(storage: Storage, when: str) -> None:
    steps = []
    for step in range(1, 50):
        fresh = subfolder(storage, str(step))
        try:
            attempt(FaultyStorage(fresh, step, when), 7, "0001-00000001")  # type: ignore[arg-type]
            break
        except Injected as error:
            steps.append(str(error))
        check_nothing_partial(fresh)
        assert fresh.list("_run/tmp") == [] or (steps[-1], when) == ("scratch", "after")  # nobody has the handle
        finish(fresh, 7, epoch=2)
    assert steps == ["scratch", "publish", "list", "create"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failure_of_every_system_call_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A full disk is waited for wherever it can be; whatever else fails, nothing partial is seen."""
    monkeypatch.setattr(room, "POLL_SECONDS", 0.0)
    failures: list[str] = []
    for step in range(1, 200):
        storage, number = open_storage(str(tmp_path / str(step))), 0
        where = ""

        def act(original: object, name: str, step: int = step) -> object:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal number, where
                number += 1
                if number == step:
                    where = name
                    raise OSError(code, os.strerror(code))
                return original(*args, **kwargs)  # type: ignore[operator]

            return call

        with monkeypatch.context() as patch:
            for name in SYSTEM_CALLS:
                patch.setattr(os, name, act(getattr(os, name), name))
            try:
                attempt(storage, 7, "0001-00000001")
                failed = False
            except OSError:
                failed = True
                failures.append(where)
        check_nothing_partial(storage)
        finish(storage, 7, epoch=2)
        if not failed and number < step:
            assert step > 20
            assert code != errno.ENOSPC or not {"rename", "link", "mkdir"} & set(failures)  # new names need room
            return
    raise AssertionError("the commit never came to its end")


def test_kill_9_at_every_system_call_of_the_commit(tmp_path: Path) -> None:
    """In a process of its own: forks and threads do not mix."""
    ended = subprocess.run(
        [sys.executable, str(Path(commit.__file__)), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 20


@pytest.mark.integration
@pytest.mark.parametrize("retry_seconds", [0, 10])
@pytest.mark.parametrize("action", ["status", "before", "during", "after"])
def test_a_fault_at_every_request_of_the_commit(s3: Bucket, action: str, retry_seconds: int) -> None:
    """With tries left the commit goes through; without, the attempt fails and the next one finds a clean place."""
    base = s3.storage(retry_seconds=retry_seconds, part_bytes=200_000)
    base.check_writable()  # as the driver does: a store that never answered is another story
    for step in range(1, 50):
        storage = subfolder(base, str(step))
        # aiohttp itself tries a reused connection once more: two faults in a row reach us.
        fault = s3.fault(".", action, skip=step - 1, times=1 if action == "status" else 2)
        try:
            attempt(storage, 7, "0001-00000001")
        except OSError:
            assert retry_seconds == 0
        reached = fault.skip == 0 and fault.times == 0
        fault.times = 0
        check_nothing_partial(storage)
        finish(storage, 7, epoch=2)
        assert s3.uploads() == 0
        if not reached:
            assert step > 7
            return
    raise AssertionError("the commit never came to its end")


@pytest.mark.integration
def test_a_refused_commit_says_so(s3: Bucket) -> None:
    storage = s3.storage()
    s3.fault("PUT .*shards", "status", times=99, status=403, code="AccessDenied")
    with pytest.raises(OutputError, match=r"shards/unit-000007.*AccessDenied"):
        attempt(storage, 7, "0001-00000001")
    assert storage.list("shards") == [] and read_markers(storage, FINGERPRINT) == {}


# --- a full disk ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("min_free_bytes", [0, 3 * 2**20])
@pytest.mark.parametrize("buffer", ["output", pytest.param("upload", marks=pytest.mark.integration)])
def test_a_full_disk_is_waited_for(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_disk: Path, buffer: str, min_free_bytes: int
) -> None:
    """Ballast leaves room for some rows only; it goes away while the writer waits; no row is lost."""
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    if buffer == "output":
        storage = open_storage(str(small_disk / "out"))
    else:
        storage = request.getfixturevalue("s3").storage(scratch_dir=str(small_disk))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(10 * 2**20))
    waits: list[str] = []

    def on_wait(reason: str, seconds: float) -> None:
        waits.append(reason)
        if len(waits) == 3:
            ballast.unlink()

    shard_writer = make_writer(storage, 0, "0001-0000000a", min_free_bytes=min_free_bytes, on_wait=on_wait)
    made = [make_sample(number, tokens=3000) for number in range(6)]  # 1.2 MB each
    for sample, states in made:
        shard_writer.add(sample, states, stats_of(states))
    marker = shard_writer.commit("e", 0)
    assert len(waits) == 3 and str(small_disk) in waits[0] and "bytes free" in waits[0]
    assert marker.rows == 6 and storage.size(str(marker.shard)) == marker.bytes
    with storage.open(str(marker.shard)) as file:
        rows = pq.ParquetFile(file).read(columns=["hidden_2"]).to_pylist()
    assert [row["hidden_2"] for row in rows] == [states[0].tobytes() for _, states in made]
    used = os.statvfs(small_disk)
    held = (used.f_blocks - used.f_bfree) * used.f_frsize
    assert held < (marker.bytes if storage.is_local else 0) + 2**17  # what was reserved is given back


def test_a_disk_that_fills_while_a_row_is_written(
    local: Storage, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where the file system cannot reserve: the attempt fails as a whole and leaves nothing."""
    storage = open_storage(str(small_disk / "out"))
    monkeypatch.setattr(scratch.Scratch, "reserve", lambda self, need, min_free: None)
    shard_writer = make_writer(storage, 0, "0001-0000000a")
    sample, states = make_sample(0, tokens=50_000)  # 19 MB
    with pytest.raises(OSError, match="No space left"):
        shard_writer.add(sample, states, stats_of(states))
    shard_writer.discard()
    assert storage.list("_run/tmp") == [] and storage.list("shards") == []


def test_what_on_wait_raises_ends_the_wait(local: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(reason: str, seconds: float) -> None:
        raise KeyboardInterrupt

    shard_writer = make_writer(local, 0, "0001-0000000a", min_free_bytes=2**60, on_wait=stop)
    sample, states = make_sample(0)
    with pytest.raises(KeyboardInterrupt):
        shard_writer.add(sample, states, stats_of(states))
    shard_writer.discard()
    assert local.list("_run/tmp") == []


def test_discard_after_commit_changes_nothing(storage: Storage) -> None:
    shard_writer = make_writer(storage, 0, "0001-0000000a")
    sample, states = make_sample(0)
    shard_writer.add(sample, states, stats_of(states))
    marker = shard_writer.commit("e", 0)
    shard_writer.discard()
    assert storage.exists(str(marker.shard))
