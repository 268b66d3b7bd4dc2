"""hs_ray.verify: in which order a shard's rows may be, and what is found whatever their order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import found
from make_output import H, MadeOutput, make_output, rewrite

from hs_ray import schema
from hs_ray.verify.planned import PlannedRows
from hs_ray.verify.report import Report

Rows = list[dict[str, Any]]
SHARD = schema.shard_path(0, "0001-aaaa")
ANOTHER_ORDER = "the samples are in another order than the plan's, in which those tried again may come last"


def reordered(made: MadeOutput, order: list[int], change: Callable[[Rows], Rows] = list) -> dict[str, list[str]]:
    """What is said of unit 0 with its rows in this order."""
    rewrite(made, 0, lambda rows: [change(rows)[i] for i in order], fit_checksums=True)
    return found(made)


@pytest.mark.parametrize("order", [[1, 2, 3, 0], [0, 3, 1, 2], [2, 0, 1, 3]])
def test_samples_that_were_tried_again_come_last(made: MadeOutput, order: list[int]):
    """What `extract_unit` leaves of a sample that failed once and was right the second time."""
    assert reordered(made, order) == {}


@pytest.mark.parametrize(("order", "row"), [([3, 2, 1, 0], 2), ([1, 0, 3, 2], 3)])
def test_no_other_order_is_ever_written(made: MadeOutput, order: list[int], row: int):
    told = [f"{SHARD}: row {row}, sample 'id-{order[row]}': {ANOTHER_ORDER}"]
    assert reordered(made, order) == {"plan": told}


def test_a_missing_a_doubled_and_a_foreign_row(made: MadeOutput):
    missing = reordered(made, [1, 3, 0])
    assert missing["coverage"] == [
        f"{SHARD}: 1 planned rows are missing, the first is (sample, token_start) ('id-2', 0)"
    ]
    assert "coverage" in reordered(made, [1, 1, 2, 3, 0])
    assert f"{SHARD}: 1 rows are there twice" in found(made)["coverage"]

    def foreign(rows: Rows) -> Rows:
        return [*rows[:3], rows[3] | {"sample_id": "nobody"}]

    told = reordered(made, [1, 2, 3, 0], foreign)
    assert told["plan"] == [f"{SHARD}: row 2, sample 'nobody': the plan of this unit has no such row (token_start 0)"]
    assert len(told["coverage"]) == 2


def test_a_sample_under_the_name_of_another(made: MadeOutput):
    """Every column but the states and the name is the other's."""

    def exchange(rows: Rows) -> Rows:
        names = [rows[i]["sample_id"] for i in (1, 0, 2, 3)]
        return [row | {"sample_id": name} for row, name in zip(rows, names, strict=True)]

    told = "\n".join(reordered(made, [1, 2, 3, 0], exchange)["plan"])
    for row, name in ((0, "id-0"), (3, "id-1")):
        assert f"row {row}, sample '{name}': line is" in told
        assert f"row {row}, sample '{name}': input_ids is not what was planned" in told


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeOutput:
    """Unit 0: rows 0 and 1 of the first sample, row 2, rows 3 to 5 of the third, row 6."""
    monkeypatch.setattr(schema, "MAX_CELL_BYTES", 50 * H * 2)
    return make_output(tmp_path / "out", lengths=[90, 40, 120, 7, 30])


def test_a_sample_of_several_rows_that_was_tried_again(split: MadeOutput):
    assert reordered(split, [2, 6, 0, 1, 3, 4, 5]) == {}


@pytest.mark.parametrize(
    ("order", "token_start"),
    [
        ([0, 2, 1, 3, 4, 5, 6], 50),
        ([2, 1, 0, 3, 4, 5, 6], 50),
        ([0, 1, 2, 3, 5, 4, 6], 100),
        ([1, 2, 3, 4, 5, 6, 0], 50),
    ],
)
def test_rows_of_a_sample_lie_together_in_the_order_of_its_tokens(
    split: MadeOutput, order: list[int], token_start: int
):
    told = reordered(split, order)
    assert told.keys() == {"plan"}
    assert f"token_start {token_start} does not follow the sample's tokens before it" in told["plan"][0]


class Name(str):
    """Counts how often it is looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        Name.looked_up += 1
        return super().__hash__()


def test_the_work_grows_with_the_rows_and_not_with_their_square():
    number, ids = 1000, np.zeros(1, np.int32)
    planned = [schema.Sample(Name(f"id-{i}"), "x", i, ids, ids) for i in range(number)]
    rows = PlannedRows(planned, H, SHARD, report := Report())
    for i, sample in enumerate(planned):
        row = {"sample_id": sample.sample_id, "source": "x", "line": i, "input_ids": ids, "loss_mask": ids}
        rows.add(i, row | {"num_tokens": 1, "sample_tokens": 1, "token_start": 0})
    rows.check_coverage()
    assert report.ok and Name.looked_up < 20 * number
