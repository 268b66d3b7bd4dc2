"""What an audit found."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

MAX_SHOWN = 50
SAY_S = 5.0  # between two lines of what is done so far
Log = Callable[[str], None]
Item = TypeVar("Item")


def with_progress(items: Iterable[Item], what: str, total: int, report: "Report", log: Log | None) -> Iterator[Item]:
    """The items, one by one; every few seconds a line says how many are done: an audit of terabytes takes hours."""
    said = time.monotonic()
    for done, item in enumerate(items):
        if log is not None and time.monotonic() - said > SAY_S:
            said = time.monotonic()
            log(f"{done:,}/{total:,} {what}, {len(report.problems):,} problems so far")
        yield item


@dataclass(frozen=True)
class Problem:
    """`check` is one word for the kind of check, `file` is relative to the output."""

    check: str
    file: str
    detail: str

    def __str__(self) -> str:
        return f"{self.check:<12} {self.file}: {self.detail}"


@dataclass
class Report:
    """Problems, and figures of what was checked. `ok` when there is no problem."""

    problems: list[Problem] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, check: str, file: str, detail: str) -> None:
        self.problems.append(Problem(check, file, detail))

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def merge(self, other: "Report") -> None:
        """Problems are appended, numbers of the same name summed."""
        self.problems += other.problems
        for name, value in other.counts.items():
            if isinstance(value, int):
                self.count(name, value)
            else:
                self.counts[name] = value

    def lines(self) -> list[str]:
        """For people: the figures, then the problems."""
        shown = [
            f"{name.replace('_', ' '):<28} {value:,}" for name, value in self.counts.items() if isinstance(value, int)
        ]
        shown += [f"PROBLEM {problem}" for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            shown.append(f"... and {len(self.problems) - MAX_SHOWN} more")
        return shown


@dataclass
class ReferenceReport(Report):
    """A comparison with a reference: `table` has its figures, for people."""

    table: list[str] = field(default_factory=list)
