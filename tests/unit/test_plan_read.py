"""A plan read back: what is damaged is refused, what is out of reach is not."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plans import build, job, tokens, write
from s3 import Bucket

from hs_ray.errors import OutputError
from hs_ray.pipeline.actor import UnitError
from hs_ray.plan import (
    read_unit,
)
from hs_ray.plan.files import PLAN, part_path, unit_digest
from hs_ray.schema import SAMPLES


def test_a_missing_part_says_which(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 3)])
    storage, summary = build(job(tmp_path))
    storage.write(f"{SAMPLES}/part-00000.parquet", b"PAR1")
    with pytest.raises(OutputError, match=r"part-00000\.parquet, the plan of unit-000000, cannot be read"):
        read_unit(storage, 0, summary.units_per_file)
    storage.remove(f"{SAMPLES}/part-00000.parquet")
    with pytest.raises(OutputError, match=r"No such file or directory.*restore the file"):
        read_unit(storage, 0, summary.units_per_file)


def test_no_flipped_bit_of_a_plan_is_read_as_another_sample(tmp_path: Path) -> None:
    """Shards, markers and verify would agree with states of the wrong tokens: nothing else knows the right ones."""
    rng = np.random.default_rng(0)
    write(tmp_path, [tokens(f"s{n}", 30, loss_mask=[0] * 10 + [1] * 20) for n in range(6)])
    storage, summary = build(job(tmp_path, shard_bytes="1KB"))
    path, planned = part_path(0), [read_unit(storage, unit, 64) for unit in range(summary.units)]
    good, refused = storage.read_bytes(path), 0
    for at in range(0, len(good), 11):  # all of them pass too, in a minute
        data = bytearray(good)
        data[at] ^= 1 << int(rng.integers(8))
        storage.write(path, bytes(data))
        for unit, samples in enumerate(planned):
            try:
                assert repr(read_unit(storage, unit, 64)) == repr(samples), f"byte {at}"
            except OutputError:
                refused += 1
    assert summary.units > 2 and refused > 100


def test_another_plans_file_is_refused(tmp_path: Path) -> None:
    """Each file has the digests of its own units, and they are of these units' numbers, too."""
    write(tmp_path, [tokens(str(n), 30) for n in range(4)])
    storage, summary = build(job(tmp_path, shard_bytes="1KB"))
    table = pq.read_table(f"{tmp_path}/out/{part_path(0)}")
    assert summary.units == 4 and len({unit_digest(table.slice(n, 1)) for n in range(4)}) == 4
    moved = table.slice(0, 1).set_column(5, PLAN.field("unit"), pa.array([1], pa.int32()))
    assert unit_digest(moved.cast(PLAN)) not in (unit_digest(table.slice(0, 1)), unit_digest(table.slice(1, 1)))


def test_a_disk_that_is_unwell_is_no_missing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be restored: the actor tries the unit again."""
    write(tmp_path, [tokens("a", 3)])
    storage, summary = build(job(tmp_path))

    def fails(path: str) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "open", fails)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read_unit(storage, 0, summary.units_per_file)
    assert str(UnitError(caught.value)).startswith(UnitError.TRANSIENT)


@pytest.mark.integration
def test_nor_is_a_store(tmp_path: Path, s3: Bucket) -> None:
    """Whether it fails when the file is opened, or while Arrow reads in it."""
    write(tmp_path, [tokens("a", 3)])
    built, summary = build(job(tmp_path))
    storage = s3.storage(retry_seconds=0.2)
    storage.write(part_path(0), built.read_bytes(part_path(0)))
    for request in ("HEAD", "GET"):
        s3.fault(request, "status", times=999)
        with pytest.raises(OSError, match=r"still failing after"):
            read_unit(storage, 0, summary.units_per_file)
        s3.faults.clear()
    assert read_unit(storage, 0, summary.units_per_file)[0].sample_id == "a"
