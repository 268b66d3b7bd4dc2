"""A disk or store that is unwell is told as that by reader, verify, describe and export, and not as damage."""

import errno
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from make_output import MadeOutput
from test_reader import ids

from hs_ray import schema
from hs_ray.describe import describe
from hs_ray.errors import ShardError
from hs_ray.export import export
from hs_ray.reader import HiddenStatesDataset
from hs_ray.storage import LocalStorage
from hs_ray.verify import integrity, verify_integrity


@pytest.fixture
def made(both_output: MadeOutput) -> MadeOutput:
    """Shared: nothing here changes it."""
    return both_output


def fail(*_: Any) -> Any:
    raise OSError(errno.EIO, "get_object: still failing after 600 s")


class Unwell(LocalStorage):
    """Read like a store, by ranges; what begins with `down` cannot be read."""

    down = "nothing"

    def local_path(self, path: str) -> str | None:
        return None

    def read_bytes(self, path: str) -> bytes:
        return fail() if path.startswith(self.down) else super().read_bytes(path)

    def open(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(Ranges(self, path), mode="r")


class Ranges(io.BytesIO):
    def __init__(self, storage: Unwell, path: str):
        super().__init__(Path(storage.root, path).read_bytes())
        self.storage, self.path = storage, path

    def read(self, size: int | None = -1) -> bytes:
        return fail() if self.path.startswith(self.storage.down) else super().read(size)


@pytest.mark.parametrize("number", [1, 9])  # of the shard that is open, and of one that is not
def test_the_reader_goes_on_after_an_outage(made: MadeOutput, number: int):
    storage = Unwell(str(made.path))
    dataset = HiddenStatesDataset(storage)
    whole = ids(dataset)
    dataset = HiddenStatesDataset(storage)
    assert dataset[0]["sample_id"] == whole[0]
    storage.down = schema.SHARDS
    with pytest.raises(OSError, match="still failing after 600 s"):
        dataset[number]
    storage.down = "nothing"
    assert dataset[number]["sample_id"] == whole[number]


def test_a_local_disk(made: MadeOutput, monkeypatch: pytest.MonkeyPatch):
    dataset = HiddenStatesDataset(str(made.path))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="still failing"):
        dataset[0]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, None])
def test_a_file_that_is_gone_is_no_outage(made: MadeOutput, monkeypatch: pytest.MonkeyPatch, code: int | None):
    def missing(*_: Any) -> Any:
        raise OSError(code, "of the file") if code else OSError("of the file")

    monkeypatch.setattr(LocalStorage, "open", missing)
    with pytest.raises(ShardError, match="of the file"):
        HiddenStatesDataset(str(made.path))[0]


@pytest.mark.parametrize("down", [schema.SHARDS, schema.SAMPLES, schema.REJECTED])
def test_verify_ends_with_an_outage(made: MadeOutput, down: str):
    storage = Unwell(str(made.path))
    assert verify_integrity(storage).ok
    storage.down = down
    with pytest.raises(OSError, match="still failing after 600 s"):
        verify_integrity(storage)


def test_of_the_units_that_wait_none_is_begun_after_an_outage(monkeypatch: pytest.MonkeyPatch):
    """Each would wait ten minutes to find out the same."""
    begun: list[int] = []
    ended = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            ended.set()  # those that are under way end no earlier
            super().shutdown(wait=wait)

    def call(number: int) -> None:
        begun.append(number)
        fail() if number == 0 else ended.wait()

    monkeypatch.setattr(integrity, "ThreadPoolExecutor", Pool)
    with pytest.raises(OSError, match="still failing"):
        list(integrity._parallel(call, list(range(4)), workers=2))
    assert set(begun) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("down", "job"),
    [
        (schema.REJECTED, lambda path, target: describe(path)),
        (schema.SHARDS, lambda path, target: describe(path)),
        (schema.SHARDS, lambda path, target: export(path, "specforge", target, workers=1)),
    ],
)
def test_describe_and_export(
    made: MadeOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: str, job: Callable[[str, str], object]
):
    well = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", lambda s, path: fail() if path.startswith(down) else well(s, path))
    with pytest.raises(OSError, match="still failing"):
        job(str(made.path), str(tmp_path / "x"))
