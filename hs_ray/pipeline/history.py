"""How a run went over time, for its report: `_run/progress/<epoch>.json`, one file a driver.

Every number is a running total, so points can be left out without making a rate wrong: when there are too many,
every second one goes. Nothing depends on the file.
"""

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from hs_ray.pipeline.board import PUSH_SECONDS, SILENT_S, EngineState
from hs_ray.schema import PROGRESS
from hs_ray.storage import Storage

log = logging.getLogger(__name__)

MOST_POINTS = 600
SAVE_EVERY_S = 20.0


class History:
    """Points of [seconds since 1970, tokens written, busy seconds of all engines, engines up]."""

    def __init__(self, storage: Storage, epoch: int, engines: int):
        self._storage, self._epoch, self._engines = storage, epoch, engines
        self._points: list[list[float]] = []
        self._every = 1  # only each so many are kept
        self._seen = 0
        self._by_engine: dict[str, dict[str, Any]] = {}
        self._saved = time.monotonic()

    def add(self, tokens: int, states: Sequence[tuple[float, EngineState]]) -> None:
        """tokens: written by this driver's engines so far; states: (seconds since heard of, state)."""
        for _, state in states:
            self._by_engine[state.engine] = {"node": state.node, "busy_s": state.busy_s, "waited_s": state.waited_s}
        up = sum(1 for heard, state in states if heard < SILENT_S and state.state in ("running", "waiting"))
        busy = sum(engine["busy_s"] for engine in self._by_engine.values())
        # An engine speaks every two seconds: what it has worked since then, or shares would swing with the reading.
        busy += sum(heard for heard, state in states if state.units and heard < 2 * PUSH_SECONDS)
        if self._seen % self._every == 0:
            self._points.append([round(time.time(), 1), tokens, round(busy, 2), up])
        self._seen += 1
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        content = {"epoch": self._epoch, "engines": self._engines, "points": self._points, "by_engine": self._by_engine}
        try:
            self._storage.write(f"{PROGRESS}/{self._epoch:06d}.json", json.dumps(content).encode())
        except OSError as error:  # a full disk, which the writers wait for
            log.warning("the history of the run was not written: %s", error)
