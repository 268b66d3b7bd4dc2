"""The plan against itself, and run.json's figures of it against its rows."""

import shutil
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import edit_json, found
from make_output import PLAN_COLUMNS, MadeOutput

from hs_ray import schema

PART = f"{schema.SAMPLES}/part-00000.parquet"
Groups = list[list[dict[str, Any]]]
TOTALS = {
    "tokens": 551,
    "longest_tokens": 128,
    "largest_unit_tokens": 275,
    "rows": 12,
    "length_histogram": [[1, 1], [8, 1], [16, 1], [32, 1], [64, 5], [128, 3]],
    "truncated": 0,
}


def edit_plan(made: MadeOutput, change: Callable[[Groups], Any], metadata: dict[str, str] | None = None) -> None:
    """`change` alters the rows of each unit."""
    path = made.path / PART
    parquet = pq.ParquetFile(path)
    groups = [parquet.read_row_group(number).to_pylist() for number in range(parquet.num_row_groups)]
    change(groups)
    with pq.ParquetWriter(path, PLAN_COLUMNS) as writer:
        for group in groups:
            writer.write_table(pa.Table.from_pylist(group, schema=PLAN_COLUMNS))
        writer.add_key_value_metadata(metadata or {})


def told(made: MadeOutput) -> str:
    return "\n".join(found(made)["plan"])


def test_totals_that_fit(made: MadeOutput):
    edit_json(made.path / schema.RUN_JSON, lambda run: run["plan"].update(TOTALS))
    edit_plan(made, lambda groups: None, {"hs_ray_units": "[[0, 4, 142], [1, 4, 275], [2, 4, 134]]"})
    assert found(made) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 550),
        ("learned_tokens", 551),
        ("longest_tokens", 64),
        ("largest_unit_tokens", 142),
        ("rows", 13),
        ("length_histogram", [[128, 12]]),
        ("state_bytes", 0),
    ],
)
def test_totals_of_run_json(made: MadeOutput, name: str, value: Any):
    edit_json(made.path / schema.RUN_JSON, lambda run: run["plan"].update({name: value}))
    problems = found(made)
    assert problems.keys() == {"plan"} and len(problems["plan"]) == 1
    assert problems["plan"][0].startswith(f"_run/run.json: plan.{name} is {value}, the plan's rows give ")


def test_no_more_are_truncated_than_are_as_long_as_may_be(made: MadeOutput):
    def change(truncated: int, longest: int, on_too_long: str) -> list[str]:
        edit_json(made.path / schema.RUN_JSON, lambda run: run["plan"].update(truncated=truncated))
        facts = {"max_seq_len": longest, "on_too_long": on_too_long}
        edit_json(made.path / schema.RUN_JSON, lambda run: run["config"].update(facts))
        return found(made).get("plan", [])

    assert change(1, 128, "truncate") == []
    assert "plan.truncated is 2, at most 1" in change(2, 128, "truncate")[0]
    assert "plan.truncated is 1, at most 0" in change(1, 128, "reject")[0]
    assert "config.max_seq_len is 100, a sample has 128 tokens" in change(0, 100, "truncate")[0]


def test_other_files_beside_the_parts(made: MadeOutput):
    shutil.copy(made.path / PART, made.path / schema.SAMPLES / "copy.parquet")
    shutil.copy(made.path / PART, made.path / schema.SAMPLES / "part-00001.parquet")
    assert [text.partition(":")[0] for text in found(made)["plan"]] == [
        "_run/samples/copy.parquet",
        "_run/samples/part-00001.parquet",
    ]


def test_any_number_of_units(made: MadeOutput):
    """It is not counted to."""
    edit_json(made.path / schema.RUN_JSON, lambda run: run["plan"].update(units=10**12))
    text = told(made)
    assert "_run/run.json: plan has 1000000000000 units" in text
    assert "_run/samples/part-00001.parquet: missing; 999999999 of the plan's 1000000000 files are" in text
    edit_json(made.path / schema.RUN_JSON, lambda run: run["plan"].update(units=3, units_per_file=0))
    assert "plan has 3 units, 0 in a file" in told(made)


def test_the_unit_column(made: MadeOutput):
    edit_plan(made, lambda groups: [row.update(unit=2) for row in groups[1]])
    assert found(made) == {"plan": [f"{PART}: the samples of unit-000001 have the units [2]"]}


def test_the_list_of_units_in_a_part(made: MadeOutput):
    edit_plan(made, lambda groups: None, {"hs_ray_units": "[[0, 4, 142], [1, 3, 275], [2, 4, 134]]"})
    assert "hs_ray_units is not what its rows are" in told(made)


def test_the_order_of_lines(made: MadeOutput):
    edit_plan(made, lambda groups: groups[0].reverse())
    assert "unit-000000: train.jsonl line 2 is not after the sample before it" in told(made)


def test_a_source_that_nobody_named(made: MadeOutput):
    edit_json(made.path / schema.RUN_JSON, lambda run: run.update(sources=[{"source": "other.jsonl"}]))
    assert "unit-000002: 'train.jsonl' is none of the sources that _run/run.json names" in told(made)


def test_values_of_masks(made: MadeOutput):
    edit_plan(made, lambda groups: groups[1][0]["loss_mask"].__setitem__(3, 2))
    assert "unit-000001: loss_mask has other values than 0 and 1" in told(made)
    edit_plan(made, lambda groups: groups[1][0]["loss_mask"].pop())
    assert "unit-000001: has samples with more or fewer loss_mask values than tokens" in told(made)
