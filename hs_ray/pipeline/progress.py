"""The driver's progress lines: plain, unbuffered, every few seconds; a bar on a terminal.

12/40 units  1,203 samples  412,345 tokens  38,900 tok/s  1.27 GB/s  ETA 12 min  8 in flight  0 failed  1 engine
"""

import sys
import time
from collections import deque
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any

import ray

from hs_ray.pipeline.board import EngineState
from hs_ray.plan.estimates import duration
from hs_ray.schema import Marker

WINDOW_S = 60.0  # the rate is over this long
STALLED_S = 120.0  # without a token written, while units are in hand


@dataclass(frozen=True)
class Total:
    """What this run has to do."""

    units: int
    tokens: int
    bytes_per_token: int


class Progress:
    """Counts what is committed, reads the board, prints. Used as a context manager."""

    def __init__(self, total: Total, board: Any, every_s: float):
        self.total, self._board, self._every_s = total, board, every_s
        self.units = self.samples = self.failed = self.tokens = self.bytes = 0
        self.states: list[tuple[float, EngineState]] = []
        self.by_engine: dict[str, list[Marker]] = {}
        self._written: deque[tuple[float, int]] = deque()
        self._stop, self._lock = Event(), Lock()
        self._bar = sys.stdout.isatty()
        self._started = time.monotonic()
        self._running_since: float | None = None
        self._thread = Thread(target=self._run, name="hs_ray-progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._bar:
            print(flush=True)

    def committed(self, marker: Marker) -> None:
        with self._lock:
            self.units += 1
            self.samples += marker.samples
            self.failed += len(marker.failed)
            self.tokens += marker.tokens
            self.bytes += marker.bytes
            self.by_engine.setdefault(marker.engine, []).append(marker)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.states = ray.get(self._board.read.remote(), timeout=self._every_s)
            except ray.exceptions.RayError:
                continue  # the board is only for show
            with self._lock:
                self._print(self.line())

    def _print(self, text: str) -> None:
        if self._bar:
            done = self.units / max(self.total.units, 1)
            bar = "#" * round(20 * done) + "." * (20 - round(20 * done))
            print(f"\r\033[K[{bar}] {text}", end="", flush=True)
        else:
            print(f"hs_ray: {text}", flush=True)

    def _rate(self) -> float:
        """Tokens written a second, over the last minute."""
        now = time.monotonic()
        self._written.append((now, max(self.tokens, sum(state.tokens for _, state in self.states))))
        while now - self._written[0][0] > WINDOW_S:
            self._written.popleft()
        (first, before), (last, after) = self._written[0], self._written[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def line(self) -> str:
        rate = self._rate()
        up = [state for _, state in self.states if state.state in ("running", "waiting")]
        parts = [f"{self.units:,}/{self.total.units:,} units", f"{self.samples:,} samples"]
        if rate:
            left = max(0, self.total.tokens - self._written[-1][1])
            parts += [
                f"{self._written[-1][1]:,} tokens",
                f"{rate:,.0f} tok/s",
                f"{rate * self.total.bytes_per_token / 1e9:.2f} GB/s",
                f"ETA {duration(left / rate)}",
            ]
        in_flight = sum(len(state.units) for state in up)
        parts += [f"{in_flight} in flight", f"{self.failed} failed", f"{len(up)} engines up"]
        return "  ".join(parts + self._remarks())

    def _remarks(self) -> list[str]:
        """Engines that start, wait for a disk, or do nothing though they have work: by name."""
        remarks = []
        for _, state in self.states:
            if state.state in ("starting", "canary"):
                remarks.append(f"{state.engine}: {state.detail or state.state}")
            elif state.state == "waiting":
                remarks.append(f"{state.engine} waits: {state.detail}")
        stalled = [state.engine for heard, state in self.states if heard > STALLED_S and state.units]
        return remarks + [f"{engine}: nothing heard of for {STALLED_S:.0f} s" for engine in stalled]

    def summary(self) -> str:
        """The last lines: totals, each engine's rate, the slowest units."""
        seconds = time.monotonic() - self._started
        rows = [
            f"{self.units:,} units, {self.samples:,} samples, {self.tokens:,} tokens, {self.bytes / 1e9:.2f} GB "
            f"in {duration(seconds)}, {self.failed} samples failed"
        ]
        busy = {state.engine: state.busy_s for _, state in self.states}
        for engine, markers in sorted(self.by_engine.items()):
            tokens = sum(marker.tokens for marker in markers)
            rate = f"{tokens / busy[engine]:,.0f} tokens/s while busy" if busy.get(engine) else "no rate known"
            rows.append(f"  {engine}: {len(markers)} units, {tokens:,} tokens, {rate}")
        slowest = sorted((m for ms in self.by_engine.values() for m in ms), key=lambda m: -m.seconds)[:3]
        rows += [f"  slowest: unit {m.unit}, {m.tokens:,} tokens in {m.seconds:.1f} s" for m in slowest]
        return "\n".join(rows)
