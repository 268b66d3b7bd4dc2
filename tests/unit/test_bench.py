"""What the benchmark makes of its timings; the timings themselves are its own affair (`jobs/bench.py`)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hs_ray.bench import plot, run, ways
from hs_ray.bench.timing import HEAD, compare, format_row
from hs_ray.config import BenchJob, load
from hs_ray.errors import ConfigError

PROMPTS: Any = [[1] * 100, [2] * 300]  # lists do for arrays: only their lengths count


class Timed:
    """A way that took these seconds, one timing after the other."""

    def __init__(self, *results: dict[str, float]):
        self.results = list(results)

    def time(self, prompts: Any) -> dict[str, float]:
        assert prompts is PROMPTS
        return self.results.pop(0)


def test_rows_are_medians_and_ratios_to_the_first_way() -> None:
    bare = Timed({"seconds": 1.0}, {"seconds": 2.0}, {"seconds": 10.0})
    ours = Timed(*[{"seconds": 4.0, "waited": waited, "idle": 1.5} for waited in (0.0, 0.3, 0.9)])
    part = Timed(*[{"seconds": 1.0, "tokens": 100}] * 3)  # a slow way, on a quarter of the prompts
    ways: Any = {"bare": bare, "ours": ours, "part": part}
    rows = list(compare(ways, {"two": PROMPTS}, 3, 10**6, {}))
    assert [(row.way, row.tokens_per_s, row.ratio) for row in rows] == [
        ("bare", 200.0, 1.0),
        ("ours", 100.0, 0.5),
        ("part", 100.0, 0.5),
    ]
    assert [row.gb_per_s for row in rows] == [0.0, 0.1, 0.1]
    assert rows[0].spread == 4.5
    assert (rows[1].waited_s, rows[1].idle_s) == pytest.approx((0.4, 1.5))
    assert len(format_row(rows[1])) == len(HEAD)


def test_ways_that_are_timed_apart_have_the_same_yardstick() -> None:
    """A large model does not fit a GPU three times: each way comes in a call of its own."""
    yardsticks: dict[str, float] = {}
    seconds = {"bare": 2.0, "ours": 4.0}
    rows = [
        row
        for name, took in seconds.items()
        for row in compare({name: Timed({"seconds": took})}, {"two": PROMPTS}, 1, 10**6, yardsticks)
    ]
    assert [(row.way, row.ratio, row.gb_per_s) for row in rows] == [("bare", 1.0, 0.0), ("ours", 0.5, 0.1)]


def test_shared_memory_is_at_most_half_of_the_machine(tiny_random: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is refused before anything starts, as in a job: the kernel would kill the engine."""
    asked = [f"model.path={tiny_random}", "engine.device=cpu", "max_seq_len=512", "bench.prompt_tokens=[512]"]
    job = load(BenchJob, "bench", asked, checked=False)
    monkeypatch.setattr(run, "node_memory", lambda: 2**30)
    assert run.resolve_bench(job).options.ring_bytes == 2**29
    monkeypatch.setattr(run, "node_memory", lambda: 2**20)
    with pytest.raises(
        ConfigError, match="4 x 512 tokens .* more than half of this engine's share of its node, 1,048,576"
    ):
        run.resolve_bench(job)


def test_bars_are_as_long_as_the_rates() -> None:
    rows = [
        {"prompts": "2048 tokens", "way": "bare engine", "tokens_per_s": 200.0, "ratio": 1.0},
        {"prompts": "mixed", "way": "<other>", "tokens_per_s": 50.0, "ratio": 0.25},
    ]
    svg = plot.draw(rows)
    assert "prompts of 2048 tokens" in svg
    assert "prompts of mixed lengths" in svg
    assert "&lt;other&gt;" in svg
    widths = [float(part.split('"')[1]) for part in svg.split("<rect")[2:] for part in [part[part.index("width") :]]]
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.01)


def test_units_are_those_of_the_jobs_plan(tiny_random: Path) -> None:
    """As many tokens as `output.shard_bytes` holds: a wider model's units have fewer, and its last one ends sooner."""
    asked = [f"model.path={tiny_random}", "engine.device=cpu", "max_seq_len=64", "bench.prompt_tokens=[64]"]
    job = load(BenchJob, "bench", [*asked, "output.shard_bytes=100KiB"], checked=False)
    setting = run.resolve_bench(job)
    assert setting.unit_tokens == 100 * 2**10 // setting.options.spec.bytes_per_token
    prompts = [np.zeros(length, np.int32) for length in (60, 64, 1, 30, 64, 64, 5)]
    units = ways._units(prompts, unit_tokens=100)
    assert [[len(sample.input_ids) for sample in unit] for unit in units] == [[60, 64], [1, 30, 64], [64, 5]]
