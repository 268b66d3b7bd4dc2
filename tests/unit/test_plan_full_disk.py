"""A disk that is full while the plan is written: waited for and told, at every step, and the plan is the same."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plans import job, tokens, units, write

from hs_ray.inputs import iter_chunk, list_sources, split_sources
from hs_ray.plan import ResolvedJob, build_plan
from hs_ray.storage import Scratch, local, open_storage, room

TIMES = 3  # that a step finds no room


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedJob:
    monkeypatch.setattr(room, "POLL_SECONDS", 0.0)
    write(tmp_path, [tokens(str(i % 20), 3 + i) for i in range(25)] + [b"bad"])
    return job(tmp_path)


def tables(resolved: ResolvedJob) -> Iterator[pa.Table]:
    for chunk in split_sources(list_sources(resolved.job.input), 400):
        yield from iter_chunk(chunk, resolved.tokenize_settings)


def build(resolved: ResolvedJob, output: Path, on_wait: Callable[[str, float], None]) -> dict[str, str]:
    """File of the plan -> sha256."""
    storage = open_storage(str(output))
    summary = build_plan(storage, tables(resolved), resolved, on_wait)
    assert sum(map(len, units(storage, summary))) == 20 and summary.rejected == 6
    assert storage.list("_run/tmp") == []
    return {str(p.relative_to(output)): hashlib.sha256(p.read_bytes()).hexdigest() for p in output.rglob("*.parquet")}


def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    left, reserve = [TIMES], Scratch.reserve

    def reserved(self: Scratch, need: int, min_free: int) -> str | None:
        left[0] -= 1
        return "the disk: 7 bytes free" if left[0] >= 0 else reserve(self, need, min_free)

    monkeypatch.setattr(Scratch, "reserve", reserved)


def no_room_for(module: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
        left, call = [TIMES], getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    return spoil


STEPS = {
    "room": no_reserve,
    "file": no_room_for(local.LocalStorage, "scratch"),
    "head": no_room_for(pq, "ParquetWriter"),
    "name": no_room_for(local, "sync_folder"),
}


@pytest.mark.parametrize("step", STEPS)
def test_each_step_waits_and_the_plan_is_the_same(
    resolved: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    want = build(resolved, tmp_path / "empty", lambda reason, _: pytest.fail(f"waits for {reason}"))
    told: list[str] = []
    STEPS[step](monkeypatch)
    assert build(resolved, tmp_path / "full", lambda reason, _: told.append(reason)) == want and len(want) >= 2
    assert len(told) == TIMES and all("the disk" in reason for reason in told)


@pytest.mark.parametrize("step", STEPS)
def test_a_wait_that_is_ended_leaves_nothing(
    resolved: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """By SIGTERM, say."""

    def ends(reason: str, waited_s: float) -> None:
        raise KeyboardInterrupt

    STEPS[step](monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        build_plan(open_storage(str(tmp_path / "out")), tables(resolved), resolved, ends)
    assert open_storage(str(tmp_path / "out")).list("_run/tmp") == []


def test_room_is_asked_for_before_anything_is_written(
    resolved: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group that a full disk cuts off cannot be written again: the writer's place in the file is lost."""
    asked: list[int] = []
    reserve = Scratch.reserve

    def reserved(self: Scratch, need: int, min_free: int) -> str | None:
        asked.append(self.size + need)
        return reserve(self, need, min_free)

    monkeypatch.setattr(Scratch, "reserve", reserved)
    build(resolved, tmp_path / "out", lambda *_: None)
    files = [pq.ParquetFile(path) for path in (tmp_path / "out").rglob("*.parquet")]
    assert len(asked) == sum(file.num_row_groups + 1 for file in files)  # 1: the footer
    assert max(path.stat().st_size for path in (tmp_path / "out").rglob("*.parquet")) <= max(asked)
