"""The rows of a shard against the plan of its unit.

They are matched by (sample_id, token_start) and not by their place: a sample that failed once and was right the second
time is written after all others of its unit (`extract`).
"""

from collections import Counter
from typing import Any

import numpy as np

from hs_ray.schema import CaptureSpec, Sample
from hs_ray.verify.report import Report

SMALL = ("sample_id", "source", "line", "num_tokens", "sample_tokens", "token_start")
Key = tuple[str, int]  # sample_id, token_start


class PlannedRows:
    """Takes a shard's rows one by one and says what is not as planned; at the end, what is not there.

    planned: the samples that should be in the shard.
    """

    def __init__(self, planned: list[Sample], hidden_size: int, path: str, report: Report):
        self._path, self._report = path, report
        self._planned = _rows(planned, hidden_size)
        self._place = {key: place for place, key in enumerate(self._planned)}
        self._seen: Counter[Key] = Counter()
        self._last = (-1, -1)  # number and place of the latest row that is in the plan
        self._turns = 0  # how often a place was before that of the row before

    def add(self, number: int, row: dict[str, Any]) -> None:
        """row: its small columns, `input_ids` and `loss_mask` [S]; number: in the shard."""
        key = row["sample_id"], row["token_start"]
        self._seen[key] += 1
        planned = self._planned.get(key)
        if planned is None:
            self._problem(number, row, f"the plan of this unit has no such row (token_start {row['token_start']})")
            return
        for name in SMALL:
            if row[name] != planned[name]:
                self._problem(number, row, f"{name} is {row[name]!r}, planned {planned[name]!r}")
        for name in ("input_ids", "loss_mask"):
            if not np.array_equal(row[name], planned[name]):
                self._problem(number, row, f"{name} is not what was planned")
        self._check_order(number, row, self._place[key])

    def _check_order(self, number: int, row: dict[str, Any], place: int) -> None:
        """A sample's rows follow each other, and samples are in the plan's order, twice over: tried once, then again.

        Not known of a row behind one that could not be read, which is a problem of its own.
        """
        last_number, last_place = self._last
        self._last = number, place
        if row["token_start"] and number == last_number + 1 and place != last_place + 1:
            self._problem(
                number, row, f"token_start {row['token_start']} does not follow the sample's tokens before it"
            )
        self._turns += place <= last_place
        if place <= last_place and self._turns == 2:
            self._problem(
                number,
                row,
                "the samples are in another order than the plan's, in which those tried again may come last",
            )

    def _problem(self, number: int, row: dict[str, Any], detail: str) -> None:
        self._report.add("plan", self._path, f"row {number}, sample {row['sample_id']!r}: {detail}")

    def check_coverage(self) -> None:
        """Every planned row was there once, and no other."""
        missing = [key for key in self._planned if key not in self._seen]
        extra = [key for key in self._seen.elements() if key not in self._planned]
        for keys, what in ((missing, "planned rows are missing"), (extra, "rows are not in the plan")):
            if keys:
                detail = f"{len(keys)} {what}, the first is (sample, token_start) {keys[0]}"
                self._report.add("coverage", self._path, detail)
        twice = self._seen.total() - len(self._seen)
        if twice:
            self._report.add("coverage", self._path, f"{twice} rows are there twice")


def _rows(planned: list[Sample], hidden_size: int) -> dict[Key, dict[str, Any]]:
    """All but the states of every row that should be there, in order."""
    spec = CaptureSpec((), "none", 0, hidden_size)  # pieces depend on the width alone
    rows = {}
    for sample in planned:
        for start, length in spec.pieces(sample.num_tokens):
            part = slice(start, start + length)
            rows[sample.sample_id, start] = {
                "sample_id": sample.sample_id,
                "source": sample.source,
                "line": sample.line,
                "num_tokens": length,
                "sample_tokens": sample.num_tokens,
                "token_start": start,
                "input_ids": sample.input_ids[part],
                "loss_mask": sample.loss_mask[part],
            }
    return rows
