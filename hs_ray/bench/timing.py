"""Interleaved repeats of several ways over the same prompts; medians; the table."""

import multiprocessing
import statistics
from collections.abc import Callable, Mapping
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
    waited_s: float


def compare(
    ways: Mapping[str, Process], workloads: Mapping[str, Prompts], repeats: int, bytes_per_token: int
) -> list[Row]:
    """Time every way on every workload, the ways in turn within each repeat. The first way is the yardstick."""
    rows: list[Row] = []
    for label, prompts in workloads.items():
        tokens = sum(len(p) for p in prompts)
        seconds: dict[str, list[float]] = {name: [] for name in ways}  # for all of the tokens
        waited: dict[str, float] = dict.fromkeys(ways, 0.0)
        for _ in range(repeats):
            for name, way in ways.items():
                result = way.time(prompts)
                seconds[name].append(result["seconds"] * tokens / result.get("tokens", tokens))
                waited[name] += result.get("waited", 0.0)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        yardstick = medians[next(iter(ways))]
        for name, times in seconds.items():
            rate = tokens / medians[name]
            captured = 0.0 if name == next(iter(ways)) else rate * bytes_per_token / 1e9
            spread = (max(times) - min(times)) / medians[name]
            rows.append(Row(label, name, rate, yardstick / medians[name], captured, spread, waited[name] / repeats))
    return rows


def format_table(rows: list[Row]) -> str:
    head = f"{'prompts':<16} {'way':<24} {'tokens/s':>10} {'ratio':>7} {'GB/s':>7} {'spread':>7} {'waited s':>9}"
    lines = [
        f"{r.prompts:<16} {r.way:<24} {r.tokens_per_s:>10,.0f} {r.ratio:>7.3f} {r.gb_per_s:>7.2f} "
        f"{r.spread:>7.3f} {r.waited_s:>9.2f}"
        for r in rows
    ]
    return "\n".join([head, *lines])
