"""What every engine is doing right now, in a small actor that the driver reads for its progress lines.

No run depends on it: what is committed is known from markers alone, and it may be gone with its node.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PUSH_SECONDS = 2.0
ASK_SECONDS = 30.0
SILENT_S = 15.0  # without a word from an engine: it is not up
OTHERS_SILENT_S = 60.0  # one that died is started again meanwhile
STUCK = "stuck"  # the state of one that keeps dying while it starts


@dataclass
class EngineState:
    """One engine's counters since it started."""

    engine: str
    node: str
    pid: int
    state: str = "starting"  # starting, canary, running, waiting, stuck
    detail: str = ""
    units: list[int] = field(default_factory=list)  # in hand
    tokens: int = 0  # of samples written, also of units that are not committed yet
    busy_s: float = 0.0
    waited_s: float = 0.0
    idle_s: float = 0.0  # since tokens last grew, or a unit came
    draining: bool = False  # begins no more units
    actor: str = ""  # Ray's id, which it keeps when it is started again


@ray.remote(num_cpus=0, max_restarts=-1)
class Board:
    def __init__(self) -> None:
        self._states: dict[str, tuple[float, EngineState]] = {}
        self._draining = False
        self._starts: dict[tuple[str, str], int] = {}  # by actor and node, since the actor last ran
        self._ran: set[str] = set()  # actors that ever did
        self._ran_on: set[str] = set()  # nodes that one did on

    def starting(self, actor: str, node: str) -> int:
        """An actor's process begins on a node. Returns how often it has begun there without coming to run since, this
        time too; a node that goes takes its count along.

        Ray starts an actor that a signal killed again under the same id, and counts only constructors that raise.
        """
        self._starts[actor, node] = self._starts.get((actor, node), 0) + 1
        return self._starts[actor, node]

    def others_go_on(self, actor: str) -> bool:
        """Whether engines work, or may come to, while this actor, which never ran and so has no unit, stays out."""
        now = time.monotonic()
        return actor not in self._ran and any(
            state.actor != actor and state.state != STUCK and now - heard < OTHERS_SILENT_S
            for heard, state in self._states.values()
        )

    def has_run(self, actor: str) -> bool:
        return actor in self._ran

    def has_run_on(self, node: str) -> bool:
        return node in self._ran_on

    def started(self, actor: str, node: str) -> None:
        self._ran.add(actor)
        self._ran_on.add(node)
        self._starts = {key: count for key, count in self._starts.items() if key[0] != actor}

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


def new_board() -> Any:
    """On the driver's node, which is there as long as anybody reads it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return Board.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]  # ray.remote adds it


def starts_in_a_row(board: Any) -> int:
    """`Board.starting` of the actor that calls it; 1 where the board cannot be asked."""
    context = ray.get_runtime_context()
    return int(_ask(1, board.starting, context.get_actor_id(), context.get_node_id()))


def has_run_on(board: Any, node: str) -> bool:
    """Whether an engine of this run has come to run on that node; true where the board cannot be asked."""
    return bool(_ask(True, board.has_run_on, node))


def has_run(board: Any) -> bool:
    """Whether the actor that calls it came to run before it was started again; true where the board cannot be asked."""
    return bool(_ask(True, board.has_run, ray.get_runtime_context().get_actor_id()))


def _ask(otherwise: Any, method: Any, *words: str) -> Any:
    """What a method of the board answers; `otherwise` where it is gone: no run depends on it."""
    try:
        return ray.get(method.remote(*words), timeout=ASK_SECONDS)
    except ray.exceptions.RayError:
        return otherwise


def wait_while_others_go_on(board: Any) -> None:
    """Of an actor that cannot start, or keeps dying while it does. Returns when no other is left; with the run it
    ends earlier."""
    actor = ray.get_runtime_context().get_actor_id()
    while True:
        with contextlib.suppress(ray.exceptions.RayError):
            if not ray.get(board.others_go_on.remote(actor), timeout=ASK_SECONDS):
                return
        time.sleep(PUSH_SECONDS)  # what is asked for is what engines say, every so often; nothing tells of silence


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
            with contextlib.suppress(ray.exceptions.RayError):  # the board is gone, or on its way back
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
