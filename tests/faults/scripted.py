"""jobs/extract.py with a scripted engine in the real actor, over real Ray, writers and stores.

An engine that costs nothing lets a hundred kills fit into minutes, and its states follow from the token ids alone,
so that every value of every shard can be checked. Run as a script it takes the overrides of jobs/extract.py.
"""

import contextlib
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

import numpy as np
import ray.cloudpickle

from hs_ray.engine.options import EngineOptions
from hs_ray.engine.ticket import SampleStates, Ticket
from hs_ray.pipeline.actor import HiddenStateExtractor
from hs_ray.schema import ColumnStats, state_checksum
from hs_ray.verify.rows import measure

IN_ENGINE = 32  # samples at most, as the shared memory of a real one bounds them
TOKENS_PER_S = "HS_RAY_TEST_TOKENS_PER_S"
WRITER_FAILS_AT = "HS_RAY_TEST_WRITER_FAILS_AT"  # samples written by one actor; "5" once, "5-" from there on
START_DIES = "HS_RAY_TEST_START_DIES"  # an engine's process is killed whenever it starts: "all", or of the one engine
# whose actor's id is in this file; the first to find none puts its own there


def states_of(ids: np.ndarray, columns: int, hidden: int) -> list[np.ndarray]:
    """C arrays, uint16 [S, H]: finite bf16 bits, no zero, different for all that came before, column and width."""
    places = np.arange(len(ids), dtype=np.uint32)
    rows = np.cumsum(_mixed(np.asarray(ids, np.uint32) * np.uint32(2654435761) + places), dtype=np.uint32)
    widths = np.arange(hidden, dtype=np.uint32) * np.uint32(2246822519)
    mixed = [_mixed(rows[:, None] + widths + np.uint32(column * 374761393)) for column in range(columns)]
    return [(bits & 0x3FFF).astype(np.uint16) | np.uint16(0x2000) for bits in mixed]


def _mixed(bits: np.ndarray) -> np.ndarray:
    """uint32: every bit of the result depends on every bit given (the last steps of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))


def _statistics(bits: np.ndarray) -> ColumnStats:
    return replace(measure(bits), checksum=state_checksum(bits))


class ScriptedEngine:
    """What the actor uses of HiddenStateEngine."""

    def __init__(self, options: EngineOptions):
        self.options, self.feeding, self.busy_s = options, Lock(), 0.0
        self._rate = float(os.environ.get(TOKENS_PER_S, "inf"))
        self._room = Semaphore(IN_ENGINE)
        self._engine = ThreadPoolExecutor(1)

    def submit(self, input_ids: np.ndarray) -> Ticket:
        started = time.monotonic()
        self._room.acquire()
        extent: Any = None  # no shared memory
        ticket = Ticket("scripted", len(input_ids), extent, 0, time.monotonic() - started)
        self._engine.submit(self._compute, ticket, input_ids)
        return ticket

    def _compute(self, ticket: Ticket, input_ids: np.ndarray) -> None:
        time.sleep(len(input_ids) / self._rate)
        self.busy_s += len(input_ids) / self._rate
        spec = self.options.spec
        states = states_of(input_ids, len(spec.columns), spec.hidden_size)
        ticket.future.set_result(SampleStates(states, [_statistics(state) for state in states]))

    def release(self, ticket: Ticket) -> None:
        ticket.released = True
        self._room.release()

    def close(self) -> None:
        self._engine.shutdown(cancel_futures=True)


def _dies(which: str | None) -> bool:
    if which is None or which == "all":
        return which == "all"
    me = ray.get_runtime_context().get_actor_id()
    with contextlib.suppress(FileExistsError), Path(which).open("x") as file:
        file.write(me)
    return Path(which).read_text() == me


class ScriptedExtractor(HiddenStateExtractor):
    written = 0

    def _start(self, options: EngineOptions) -> Any:
        if _dies(os.environ.get(START_DIES)):
            os.kill(os.getpid(), signal.SIGKILL)
        return ScriptedEngine(options)

    def _written(self, tokens: int) -> None:
        super()._written(tokens)
        self.written += 1
        first, *onwards = os.environ.get(WRITER_FAILS_AT, "0").split("-")
        if self.written == int(first) or (onwards and self.written > int(first)):
            raise OSError(5, "Input/output error (injected)")


def main() -> None:
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "jobs"))
    import scripted  # this module under its own name, so that the actor's class is shipped by value
    from extract import main as extract

    from hs_ray.config import ExtractJob, run_job
    from hs_ray.pipeline import extraction

    ray.cloudpickle.register_pickle_by_value(scripted)
    extraction.HiddenStateExtractor = scripted.ScriptedExtractor  # type: ignore[misc]
    run_job(ExtractJob, "extract", extract, checked=False)


if __name__ == "__main__":
    main()
