"""The driver's progress lines: plain and unbuffered, every few seconds; on a terminal one line with a bar.

12/40 units  1,203/4,000 samples  412,345 tokens  38,900 tok/s  1.3 GB/s  ETA 12 min  4 units in flight
0 rejected  1/1 engines up                                                     (one line in the log)
"""

import heapq
import os
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

import ray

from hs_ray.pipeline.board import SILENT_S, STUCK, EngineState
from hs_ray.pipeline.history import History
from hs_ray.plan.estimates import duration, size
from hs_ray.schema import Marker

WINDOW_S = 60.0  # the rate is over this long
STALLED_S = 120.0  # without a token written, while units are in hand
FORGOTTEN_S = 300.0  # a silent engine is named for so long; then it is only missing from the count
QUIET_S = 15.0  # between two lines while nothing is written yet
NAMED = 3  # engines named in one line
DRAIN_S = 0.5  # between looks once the run is to stop
SLOWEST = 3  # units named in the summary


@dataclass(frozen=True)
class Total:
    """The whole plan, and what earlier drivers committed of it."""

    units: int
    samples: int
    tokens: int
    bytes_per_token: int
    engines: int  # asked for
    rejected: int = 0  # lines of the input
    earlier_units: int = 0
    earlier_samples: int = 0
    earlier_tokens: int = 0


@dataclass
class EngineTotal:
    """What this driver saw one engine commit."""

    units: int = 0
    tokens: int = 0


@dataclass
class Progress:
    """Counts what is committed, reads the board, prints. Used as a context manager; memory does not grow with units."""

    total: Total
    board: Any
    every_s: float
    history: History
    stopping: Event = field(default_factory=Event)  # set: have the engines finish what is in hand, then say so
    states: list[tuple[float, EngineState]] = field(default_factory=list)  # seconds since heard of, state
    units: int = 0  # these six of this driver alone
    samples: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    by_engine: dict[str, EngineTotal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slowest: list[tuple[float, int, int]] = []  # seconds, unit, tokens
        self._window: deque[tuple[float, int]] = deque()  # time, tokens written
        self._stop, self._lock = Event(), Lock()
        self._heard: dict[str, float] = {}  # engine -> when; a board that came back has not heard of all of them yet
        self._bar = sys.stdout.isatty()
        self._started = time.monotonic()
        self._thread = Thread(target=self._run, name="hs_ray-progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._bar:
            print(flush=True)
        self._look()
        self.history.save()

    def committed(self, marker: Marker) -> None:
        with self._lock:
            self.units += 1
            self.samples += marker.samples
            self.failed += len(marker.failed)
            self.tokens += marker.tokens
            self.bytes += marker.bytes
            engine = self.by_engine.setdefault(marker.engine, EngineTotal())
            engine.units += 1
            engine.tokens += marker.tokens
            heapq.heappush(self._slowest, (marker.seconds, marker.unit, marker.tokens))
            if len(self._slowest) > SLOWEST:
                heapq.heappop(self._slowest)

    def _run(self) -> None:
        said = 0.0
        while not self._stop.wait(min(self.every_s, DRAIN_S) if self.stopping.is_set() else self.every_s):
            self._look()
            if self.stopping.is_set():
                self._drain()
            with self._lock:
                line = self.line()
                if self._window[-1][1] or time.monotonic() - said >= QUIET_S:  # a large model loads for minutes
                    self._print(line)
                    said = time.monotonic()

    def _drain(self) -> None:
        """No unit is begun any more; once none is in hand, the main thread hears of it."""
        self.board.drain.remote()
        now, states = time.monotonic(), {state.engine: state for _, state in self.states}
        alive = [states.get(engine) for engine, heard in self._heard.items() if now - heard < SILENT_S]
        if all(state is not None and state.draining and not state.units for state in alive):
            os.kill(os.getpid(), signal.SIGALRM)

    def _look(self) -> None:
        """Read the board, which is only for show: a read that fails is left out."""
        try:
            self.states = ray.get(self.board.read.remote(), timeout=max(self.every_s, 1.0))
        except ray.exceptions.RayError:
            return
        now = time.monotonic()
        self._heard |= {state.engine: now - heard for heard, state in self.states}
        with self._lock:
            self.history.add(self._written(), self.states)

    def _print(self, text: str) -> None:
        if self._bar:
            done = (self.total.earlier_units + self.units) / max(self.total.units, 1)
            bar = "#" * round(20 * done) + "." * (20 - round(20 * done))
            print(f"\r\033[K[{bar}] {text}", end="", flush=True)
        else:
            print(f"hs_ray: {text}", flush=True)

    def _written(self) -> int:
        """Tokens committed, and those of live engines' units in hand; what died with an engine is not counted."""
        pending = 0
        for heard, state in self.states:
            known = self.by_engine.get(state.engine, EngineTotal()).tokens
            if heard < SILENT_S and state.units:
                pending += max(0, state.tokens - known)
        return self.tokens + pending

    def _rate(self, written: int) -> float:
        """Tokens written a second over the last minute, from the first token on."""
        now = time.monotonic()
        if not written:
            self._window.clear()
        self._window.append((now, written))
        while now - self._window[0][0] > WINDOW_S and len(self._window) > 2:
            self._window.popleft()
        (first, before), (last, after) = self._window[0], self._window[-1]
        return max(0.0, (after - before) / (last - first)) if last > first else 0.0

    def line(self) -> str:
        total = self.total
        up = [state for heard, state in self.states if heard < SILENT_S and state.state in ("running", "waiting")]
        written = self._written()
        rate = self._rate(written)
        parts = [
            f"{total.earlier_units + self.units:,}/{total.units:,} units",
            f"{total.earlier_samples + self.samples:,}/{total.samples:,} samples",
        ]
        if written:
            left = max(0, total.tokens - total.earlier_tokens - written)
            parts += [
                f"{written:,} tokens",
                f"{rate:,.0f} tok/s",
                f"{size(rate * total.bytes_per_token)}/s",
                f"ETA {duration(left / rate) if rate else 'unknown'}",
            ]
        parts += [
            f"{sum(len(state.units) for state in up)} units in flight",
            f"{total.rejected + self.failed:,} rejected",
            f"{len(up)}/{total.engines} engines up",
        ]
        return "  ".join(parts + self._remarks())

    def _remarks(self) -> list[str]:
        """Engines that start, wait for a disk, hang or are gone: by name, and with how long."""
        starting: dict[str, list[str]] = {}
        others = []
        for heard, state in self.states:
            if heard > SILENT_S:
                if heard < FORGOTTEN_S:
                    others.append(f"{state.engine}: no word for {duration(heard)}")
            elif state.state in ("starting", "canary"):
                starting.setdefault(state.detail or state.state, []).append(
                    f"{state.engine} ({duration(state.idle_s)})"
                )
            elif state.state == "waiting":
                others.append(f"{state.engine} waits: {state.detail}")
            elif state.state == STUCK:
                others.append(f"{state.engine} {state.detail}")
            elif state.units and state.idle_s > STALLED_S:
                units = ", ".join(str(unit) for unit in state.units)
                others.append(f"{state.engine} is stalled: no token for {duration(state.idle_s)}, units {units}")
        if not self.states:
            others.append(f"no engine has started yet, {duration(time.monotonic() - self._started)}")
        loading = [
            f"{', '.join(names) if len(names) <= NAMED else f'{len(names)} engines'}: {what}"
            for what, names in starting.items()
        ]
        more = [f"and {len(others) - NAMED} more"] if len(others) > NAMED else []
        return loading + others[:NAMED] + more

    def summary(self) -> str:
        """The last lines: totals, each engine's rate, the slowest units."""
        seconds = time.monotonic() - self._started
        rows = [
            f"hs_ray: {self.units:,} units, {self.samples:,} samples, {self.tokens:,} tokens, {size(self.bytes)} in "
            f"{duration(seconds)} ({self.tokens / seconds:,.0f} tok/s, {size(self.bytes / seconds)}/s with "
            f"starting), {self.failed:,} samples failed"
        ]
        busy = Counter({state.engine: state.busy_s for _, state in self.states})
        for name, engine in sorted(self.by_engine.items()):
            rate = f", {engine.tokens / busy[name]:,.0f} tok/s while busy" if busy[name] else ""
            rows.append(f"  engine {name}: {engine.units:,} units, {engine.tokens:,} tokens{rate}")
        for took, unit, tokens in sorted(self._slowest, reverse=True):
            rows.append(f"  slowest: unit {unit}, {tokens:,} tokens in {took:.1f} s")
        return "\n".join(rows)
