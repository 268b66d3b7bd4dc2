"""One unit through an engine that is scripted sample by sample."""

from concurrent.futures import Future
from threading import Lock
from typing import Any

import numpy as np
import pytest

from hs_ray.engine.engine import RequestError
from hs_ray.engine.ring import Extent
from hs_ray.engine.ticket import SampleStates, Ticket
from hs_ray.errors import CaptureError
from hs_ray.extract import extract_unit
from hs_ray.schema import CaptureSpec, ColumnStats, Sample

SPEC = CaptureSpec((0, 2), "none", 4, 8)


class ScriptedEngine:
    """Answers each sample by its first token id: 0 right, 1 refused, 2 NaN, 3 zero rows, 4 wrong once, 5 a gap."""

    def __init__(self) -> None:
        self.feeding = Lock()
        self.tries: dict[int, int] = {}
        self.released: list[str] = []
        self.submitted: list[int] = []

    def submit(self, ids: np.ndarray) -> Ticket:
        kind, line = int(ids[0]), int(ids[1])
        self.tries[line] = self.tries.get(line, 0) + 1
        self.submitted.append(line)
        ticket = Ticket(f"r{line}-{self.tries[line]}", len(ids), Extent(0, 0), 2, 0.5)
        stats = ColumnStats(rows=len(ids), sum_squares=1.0, absmax=1.0)
        states = [np.full((len(ids), 8), line, np.uint16)] * 2
        if kind == 1:
            ticket.future.set_exception(RequestError("refused"))
        elif kind == 5:
            ticket.future.set_exception(CaptureError("rows missing"))
        elif kind == 2 or (kind == 4 and self.tries[line] == 1):
            bad = ColumnStats(len(ids), 1.0, 1.0, nonfinite_rows=1)
            ticket.future.set_result(SampleStates(states, [stats, bad]))
        elif kind == 3:
            bad = ColumnStats(len(ids), 1.0, 1.0, zero_rows=2)
            ticket.future.set_result(SampleStates(states, [bad, bad]))
        else:
            ticket.future.set_result(SampleStates(states, [ColumnStats(len(ids), 1.0, 1.0, zero_rows=1), stats]))
        return ticket

    def release(self, ticket: Ticket) -> None:
        ticket.released = True
        self.released.append(ticket.rid)


class ListWriter:
    def __init__(self) -> None:
        self.spec = SPEC
        self.added: list[int] = []
        self.failed: list[tuple[int, str]] = []

    def add(self, sample: Sample, states: Any, stats: Any) -> None:
        self.added.append(sample.line)

    def fail(self, sample: Sample, code: str, message: str) -> None:
        assert message.endswith("(tried twice)")
        self.failed.append((sample.line, code))


def sample(line: int, kind: int) -> Sample:
    return Sample(f"s{line}", "x", line, np.array([kind, line, 7], np.int32), np.ones(3, np.uint8))


def test_a_bad_sample_is_tried_again_and_then_recorded_alone() -> None:
    engine, writer = ScriptedEngine(), ListWriter()
    kinds = [0, 1, 2, 0, 3, 4, 0]
    waited = extract_unit(engine, writer, [sample(i, kind) for i, kind in enumerate(kinds)])  # type: ignore[arg-type]
    assert writer.added == [0, 3, 6, 5]  # 5 was right the second time
    assert writer.failed == [(1, "engine_error"), (2, "non_finite"), (4, "zero_rows")]
    assert engine.tries == {0: 1, 1: 2, 2: 2, 3: 1, 4: 2, 5: 2, 6: 1}
    assert len(engine.released) == 11  # every ticket, also of failures
    assert waited == pytest.approx(0.5 * 7)


def test_wrong_rows_end_the_attempt_and_give_everything_back() -> None:
    engine, writer = ScriptedEngine(), ListWriter()
    with pytest.raises(CaptureError, match="rows missing"):
        extract_unit(engine, writer, [sample(0, 0), sample(1, 5), sample(2, 0), sample(3, 0)])  # type: ignore[arg-type]
    assert writer.added == [0]
    assert writer.failed == []
    assert sorted(engine.released) == sorted(f"r{line}-1" for line in engine.submitted)


def test_a_unit_is_submitted_whole_before_the_next() -> None:
    engine, writer = ScriptedEngine(), ListWriter()
    engine.feeding.acquire()
    import threading

    done: Future[None] = Future()
    thread = threading.Thread(
        target=lambda: done.set_result(extract_unit(engine, writer, [sample(0, 0)]) and None)  # type: ignore[arg-type]
    )
    thread.start()
    thread.join(0.2)
    assert engine.submitted == []  # another unit is being submitted
    engine.feeding.release()
    thread.join(10)
    assert engine.submitted == [0]
