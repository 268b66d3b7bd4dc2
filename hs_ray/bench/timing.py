"""Interleaved repeats of several ways over the same prompts; medians; the table."""

import contextlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hs_ray.bench.prompts import Prompts
from hs_ray.bench.ways import Setting, Way, serve


class Process:
    """One way in its own (spawned) process."""

    def __init__(self, make: Callable[[Setting], Way], setting: Setting):
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child, make, setting))
        self.process.start()
        child.close()

    def wait(self) -> None:
        """Until it is ready to be timed. Raises RuntimeError with what it raised."""
        self._take()

    def _take(self) -> Any:
        answer = self.connection.recv()
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def time(self, prompts: Prompts) -> dict[str, float]:
        self.connection.send(prompts)
        result: dict[str, float] = self._take()
        return result

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it ended by itself, with an error that was raised already
            self.connection.send(None)
        self.process.join()


@dataclass(frozen=True)
class Row:
    prompts: str  # what was sent, in words
    way: str
    tokens_per_s: float  # median
    ratio: float  # to the first way
    gb_per_s: float
    spread: float  # (largest - smallest) / median of the repeats
    waited_s: float  # seconds that samples waited for shared memory, that is for the writers
    idle_s: float  # seconds without a sample in the engine: mostly the end, when the last unit is still being written


def compare(
    ways: Mapping[str, Process],
    workloads: Mapping[str, Prompts],
    repeats: int,
    bytes_per_token: int,
    yardsticks: dict[str, float],
) -> Iterator[Row]:
    """Time every way on every workload, the ways in turn within each repeat.

    yardsticks: workload -> seconds of the way that was timed first, which the ratios are to; it is put there by the
    first call. A workload's rows come as soon as it is timed: what was measured before a run is cut off is not lost.
    """
    for label, prompts in workloads.items():
        tokens = sum(len(p) for p in prompts)
        seconds: dict[str, list[float]] = {name: [] for name in ways}  # for all of the tokens
        lost: dict[str, list[float]] = {name: [0.0, 0.0] for name in ways}  # waited, idle
        for _ in range(repeats):
            for name, way in ways.items():
                result = way.time(prompts)
                seconds[name].append(result["seconds"] * tokens / result.get("tokens", tokens))
                for index, key in enumerate(("waited", "idle")):
                    lost[name][index] += result.get(key, 0.0) / repeats
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, times in seconds.items():
            rate = tokens / medians[name]
            captured = rate * bytes_per_token / 1e9 if label in yardsticks else 0.0
            yardstick = yardsticks.setdefault(label, medians[name])
            spread = (max(times) - min(times)) / medians[name]
            yield Row(label, name, rate, yardstick / medians[name], captured, spread, *lost[name])


HEAD = (
    f"{'prompts':<16} {'way':<24} {'tokens/s':>10} {'ratio':>7} {'GB/s':>7} {'spread':>7} {'waited s':>9} {'idle s':>7}"
)


def format_row(row: Row) -> str:
    return (
        f"{row.prompts:<16} {row.way:<24} {row.tokens_per_s:>10,.0f} {row.ratio:>7.3f} {row.gb_per_s:>7.2f} "
        f"{row.spread:>7.3f} {row.waited_s:>9.2f} {row.idle_s:>7.2f}"
    )
