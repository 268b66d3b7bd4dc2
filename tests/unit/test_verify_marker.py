"""A marker against itself: checksums of columns and samples, attempt, columns that are equal by definition."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import edit_json, found
from make_output import MadeOutput, make_output, rewrite

from hs_ray import schema

MARKER = schema.marker_path(1)


def summed(marker: dict[str, Any]) -> None:
    """The columns' checksums, as the writer makes them."""
    for number, stats in enumerate(marker["columns"].values()):
        stats["checksum"] = sum(sums[number] for sums in marker["checksums"].values()) % 2**64


def ordered(marker: dict[str, Any]) -> None:
    names = ("hidden_2", "hidden_4", "hidden_5", "final_pre_norm")
    marker["columns"] = {name: marker["columns"][name] for name in names}
    summed(marker)


def test_sums_that_fit(made: MadeOutput):
    edit_json(made.path / MARKER, ordered)
    assert found(made) == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["columns"]["hidden_4"].update(checksum=5), "column hidden_4: checksum is 5, those of its samples"),
        (lambda m: m["columns"]["hidden_4"].update(sum_squares=float("inf")), "no finite number"),
        (lambda m: m["columns"].update(hidden_7=m["columns"]["hidden_4"]), "has statistics of hidden_7"),
        (lambda m: m["checksums"].update(nobody=[1, 2, 3, 4]), "has checksums of 1 samples that it did not commit"),
        (lambda m: m.update(epoch=2), "attempt 0001-aaaa is none of epoch 2"),
        (lambda m: m.update(attempt="0001-bbbb"), "which is no shard of attempt 0001-bbbb"),
    ],
)
def test_what_does_not_fit(made: MadeOutput, change: Callable[[Any], Any], told: str):
    edit_json(made.path / MARKER, change)
    assert told in "".join(text for texts in found(made).values() for text in texts)


def test_the_last_state_is_the_input_of_the_final_norm(tmp_path: Path):
    made = make_output(tmp_path / "out", layers=(2, 8))
    assert found(made) == {}

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[0]["final_pre_norm"][3, 3] ^= 1
        return rows

    rewrite(made, 1, change, fit_checksums=True)
    assert "hidden_8 and final_pre_norm should be equal; 1 samples have other" in "".join(found(made)["columns"])
