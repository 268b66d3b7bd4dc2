"""Ours against transformers: relative errors of every column, and whether they pass.

transformers in fp32 is taken as the truth; its own bf16 run on the same device says what rounding alone does.
Errors are of tokens, each counting alike, so that neither a token of extreme size nor the length of a prompt
decides: for token t, `||x_t - truth_t|| / ||truth_t||`. Two numbers a column: the root mean square over all tokens,
and the worst token, which shows a single exchanged or stale row that the mean would hide.

S tokens of a prompt, H hidden_size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FACTOR = 1.5  # of the bf16 run's error
FLOOR = 0.004  # half a unit in the last place of bf16: rounding of the stored value itself
WORST_FACTOR, WORST_FLOOR = 3.0, 0.05  # a tie in routing falls the other way for single tokens

States = Mapping[str, npt.NDArray[np.float32]]  # column -> [S, H], of one prompt


@dataclass(frozen=True)
class ColumnResult:
    """One column over all prompts, sent in one way."""

    column: str
    error: float  # root mean square over tokens
    worst: float  # largest of a token
    bf16_error: float  # the same of transformers' bf16 run
    bf16_worst: float

    @property
    def limit(self) -> float:
        return max(FACTOR * self.bf16_error, FLOOR)

    @property
    def worst_limit(self) -> float:
        return max(WORST_FACTOR * self.bf16_worst, WORST_FLOOR)

    @property
    def ok(self) -> bool:
        return self.error <= self.limit and self.worst <= self.worst_limit  # False for NaN


def token_errors(x: npt.NDArray[np.float32], truth: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """[S, H] each -> relative error of every token, [S]. Infinite where x is not finite or shapes differ."""
    if x.shape != truth.shape:
        return np.full(len(truth), np.inf)
    a, b = x.astype(np.float64), truth.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)
    return np.where(np.isfinite(found), found, np.inf)


def compare(
    ours: Sequence[States], truth: Sequence[States], bf16: Sequence[States], columns: Sequence[str]
) -> list[ColumnResult]:
    """One item a prompt in each sequence. A column that is missing in ours is an error of infinity."""
    results = []
    for column in columns:
        own, rounded = [], []
        for mine, right, theirs in zip(ours, truth, bf16, strict=True):
            absent = np.full_like(right[column], np.nan)
            own.append(token_errors(mine.get(column, absent), right[column]))
            rounded.append(token_errors(theirs[column], right[column]))
        a, b = np.concatenate(own), np.concatenate(rounded)
        results.append(ColumnResult(column, _rms(a), float(a.max()), _rms(b), float(b.max())))
    return results


def _rms(values: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))


def worst_of(runs: Sequence[Sequence[ColumnResult]]) -> list[ColumnResult]:
    """The largest error of every column over several ways of sending the same prompts."""
    return [max(results, key=lambda r: (not r.ok, r.error / r.limit)) for results in zip(*runs, strict=True)]


def table(results: Sequence[ColumnResult]) -> list[str]:
    """Text lines: a heading, and one a column."""
    lines = [f"{'column':<16} {'error':>9} {'allowed':>9} {'bf16 run':>9} {'worst':>9} {'allowed':>9}"]
    for r in results:
        lines.append(
            f"{r.column:<16} {r.error:9.5f} {r.limit:9.5f} {r.bf16_error:9.5f} {r.worst:9.5f} {r.worst_limit:9.5f}"
            f"{'' if r.ok else '  WRONG'}"
        )
    return lines
