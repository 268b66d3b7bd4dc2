"""hs_ray.pipeline.progress: what the driver's lines say in each situation. No Ray here."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hs_ray.pipeline import progress as module
from hs_ray.pipeline.board import EngineState, Reporter
from hs_ray.pipeline.progress import Progress, Total
from hs_ray.schema import Marker

TOTAL = Total(units=40, samples=400, tokens=400_000, bytes_per_token=1000, engines=2, rejected=3)
RUNNING = EngineState("a-1", "n", 1, state="running", units=[4, 5], tokens=12_000, busy_s=20.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def made(total: Total = TOTAL) -> Progress:
    history: Any = None
    return Progress(total, None, 5.0, history)


def marker(unit: int, tokens: int = 10_000, engine: str = "a-1", seconds: float = 8.0) -> Marker:
    return Marker(
        unit, "0001-a", 1, "f", f"shards/{unit}", tokens * 1000, "s", 10, 10, tokens, engine=engine, seconds=seconds
    )


def test_before_any_engine(clock: list[float]) -> None:
    shown = made()
    clock[0] += 7
    assert shown.line() == (
        "0/40 units  0/400 samples  0 units in flight  3 rejected  0/2 engines up  no engine has started yet, 7 s"
    )


def test_loading_is_shown_as_such(clock: list[float]) -> None:
    shown = made()
    shown.states = [(0.5, EngineState("a-1", "n", 1, detail="loading the model", idle_s=12.0))]
    assert shown.line().endswith("0/2 engines up  a-1 (12 s): loading the model")
    shown.states = [(0.5, EngineState(f"a-{i}", "n", i, detail="loading the model")) for i in range(8)]
    assert shown.line().endswith("8 engines: loading the model")


def test_running(clock: list[float]) -> None:
    shown = made()
    shown.line()
    shown.states = [(1.0, replace(RUNNING, tokens=2_000)), (1.0, replace(RUNNING, engine="b-2", tokens=0, units=[6]))]
    shown.line()
    clock[0] += 10
    shown.states = [(1.0, RUNNING), (1.0, replace(RUNNING, engine="b-2", tokens=3_000, units=[6]))]
    shown.committed(marker(3))
    # 12,000 of a-1, of which 10,000 are committed, and 3,000 of b-2: 13,000 more than ten seconds ago
    assert shown.line() == (
        "1/40 units  10/400 samples  15,000 tokens  1,500 tok/s  1.5 MB/s  ETA 4 min  3 units in flight  3 rejected  "
        "2/2 engines up"
    )


def test_what_a_dead_engine_had_in_hand_is_not_counted(clock: list[float]) -> None:
    shown = made()
    shown.committed(marker(3))
    shown.states = [(1.0, RUNNING)]
    assert "12,000 tokens" in shown.line()
    shown.states = [(40.0, RUNNING)]
    line = shown.line()
    assert "10,000 tokens" in line and line.endswith("0/2 engines up  a-1: no word for 40 s")
    shown.states = [(4000.0, RUNNING)]
    assert shown.line().endswith("0/2 engines up")


def test_stalled_and_waiting_engines_are_named(clock: list[float]) -> None:
    shown = made()
    shown.states = [
        (1.0, replace(RUNNING, idle_s=200.0)),
        (1.0, replace(RUNNING, engine="b-2", state="waiting", detail="disk full, 1 GB needed")),
    ]
    line = shown.line()
    assert "a-1 is stalled: no token for 3 min, units 4, 5" in line
    assert "b-2 waits: disk full, 1 GB needed" in line
    shown.states = [(1.0, replace(RUNNING, engine=f"e-{i}", idle_s=200.0)) for i in range(9)]
    assert shown.line().endswith("and 6 more")


def test_a_resumed_run_counts_what_was_there(clock: list[float]) -> None:
    shown = made(replace(TOTAL, earlier_units=30, earlier_samples=300, earlier_tokens=300_000))
    shown.committed(marker(31))
    clock[0] += 10
    shown.line()
    shown.committed(marker(32))
    clock[0] += 10
    assert shown.line().startswith("32/40 units  320/400 samples  20,000 tokens  1,000 tok/s  1.0 MB/s  ETA 80 s")


def test_summary(clock: list[float]) -> None:
    shown = made()
    shown.states = [(1.0, RUNNING)]
    for unit in range(5):
        shown.committed(marker(unit, seconds=float(unit)))
    clock[0] += 100
    assert shown.summary().splitlines() == [
        "hs_ray: 5 units, 50 samples, 50,000 tokens, 50.0 MB in 100 s (500 tok/s, 500.0 kB/s with starting), "
        "0 samples failed",
        "  engine a-1: 5 units, 50,000 tokens, 2,500 tok/s while busy",
        "  slowest: unit 4, 10,000 tokens in 4.0 s",
        "  slowest: unit 3, 10,000 tokens in 3.0 s",
        "  slowest: unit 2, 10,000 tokens in 2.0 s",
    ]


def test_reporter_says_how_long_nothing_moved() -> None:
    pushed: list[EngineState] = []

    class Handle:
        class push:
            @staticmethod
            def remote(state: EngineState) -> None:
                pushed.append(replace(state))

    reporter = Reporter(Handle, EngineState("a", "n", 1))
    reporter.begin(1)
    reporter._moved -= 50
    reporter._stop.set()
    reporter._run()
    assert pushed[-1].idle_s >= 50
    reporter.written(7)
    reporter._run()
    assert pushed[-1].idle_s < 5 and pushed[-1].tokens == 7 and pushed[-1].state == "running"


def test_a_run_that_is_to_stop_waits_for_every_engine_that_lives(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the board was started again: at first it knows none of them, and later none that died before."""
    told: list[Any] = []
    board: dict[str, tuple[float, EngineState]] = {}
    drained: list[int] = []
    remote = SimpleNamespace(remote=lambda: [(clock[0] - heard, state) for heard, state in board.values()])
    monkeypatch.setattr(module.ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(module.os, "kill", lambda *_: drained.append(1))
    history: Any = SimpleNamespace(add=lambda *_: None)
    shown = Progress(
        TOTAL, SimpleNamespace(read=remote, drain=SimpleNamespace(remote=lambda: told.append(1))), 5.0, history
    )

    def look(*states: EngineState) -> bool:
        board.update({state.engine: (clock[0], state) for state in states})
        drained.clear()
        shown._look()
        shown._drain()
        return bool(drained)

    idle = replace(RUNNING, engine="b-2", units=[], draining=True)
    assert not look(RUNNING, idle)
    board.clear()
    assert not look()
    assert not look(idle)
    clock[0] += 30  # a-1 died, and the board that would know of it too
    assert look(idle)
    assert told
