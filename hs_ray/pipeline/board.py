"""What every engine is doing right now, in a small actor that the driver reads for its progress lines.

Nothing depends on it: what is committed is known from markers alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

import ray

PUSH_SECONDS = 2.0


@dataclass
class EngineState:
    """One engine's counters since it started."""

    engine: str
    node: str
    pid: int
    state: str = "starting"  # starting, canary, running, waiting
    detail: str = ""
    units: list[int] = field(default_factory=list)  # in hand
    tokens: int = 0  # of samples written, also of units that are not committed yet
    busy_s: float = 0.0
    waited_s: float = 0.0
    idle_s: float = 0.0  # since tokens last grew, or a unit came
    draining: bool = False  # begins no more units


@ray.remote(num_cpus=0)
class Board:
    def __init__(self) -> None:
        self._states: dict[str, tuple[float, EngineState]] = {}
        self._draining = False
        self._starts: dict[str, int] = {}  # by actor, since it last ran

    def starting(self, actor: str) -> int:
        """An actor's process begins. Returns how often it has begun in a row without coming to run, this one too.

        Ray starts an actor that a signal killed again under the same id, and counts only constructors that raise.
        """
        self._starts[actor] = self._starts.get(actor, 0) + 1
        return self._starts[actor]

    def started(self, actor: str) -> None:
        self._starts.pop(actor, None)

    def push(self, state: EngineState) -> bool:
        """Returns whether engines are to begin no more units."""
        self._states[state.engine] = (time.monotonic(), state)
        return self._draining

    def drain(self) -> None:
        self._draining = True

    def read(self) -> list[tuple[float, EngineState]]:
        """(seconds since it was heard of, state) of every engine."""
        now = time.monotonic()
        return [(now - heard, state) for heard, state in self._states.values()]


class Reporter:
    """An engine's side: its state is pushed every few seconds, and never waited for."""

    def __init__(self, board: Any, state: EngineState, refresh: Callable[[EngineState], None] | None = None):
        self._board, self.state, self._refresh = board, state, refresh
        self._lock, self._stop = Lock(), Event()
        self._moved = time.monotonic()
        self.draining = Event()
        Thread(target=self._run, name="hs_ray-report", daemon=True).start()

    def _run(self) -> None:
        answer = None
        while True:
            if answer is not None and ray.wait([answer], timeout=0)[0] and ray.get(answer):
                self.draining.set()
            with self._lock:
                answer = self._push()
            if self._stop.wait(PUSH_SECONDS):
                return

    def _push(self) -> Any:
        if self._refresh is not None:
            self._refresh(self.state)
        self.state.idle_s = time.monotonic() - self._moved
        self.state.draining = self.draining.is_set()
        return self._board.push.remote(self.state)

    def set(self, state: str, detail: str = "") -> None:
        with self._lock:
            self.state.state, self.state.detail = state, detail

    def written(self, tokens: int) -> None:
        with self._lock:
            self.state.tokens += tokens
            self._moved = time.monotonic()
            self.state.state, self.state.detail = "running", ""

    def waited(self, seconds: float) -> None:
        with self._lock:
            self.state.waited_s += seconds

    def begin(self, unit: int) -> None:
        with self._lock:
            if not self.state.units:
                self._moved = time.monotonic()
            self.state.units.append(unit)

    def end(self, unit: int) -> None:
        with self._lock:
            self.state.units.remove(unit)
            self._push()  # before the driver hears of the unit, which may be the run's last

    def close(self) -> None:
        self._stop.set()
