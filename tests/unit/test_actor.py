"""What the actor reports of its engine; its work is tried in tests/integration and tests/faults."""

from types import SimpleNamespace
from typing import Any

import pytest

from hs_ray.pipeline import actor
from hs_ray.pipeline.actor import HiddenStateExtractor
from hs_ray.pipeline.board import EngineState


def test_the_canarys_seconds_are_not_the_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard's and a report's tokens by busy second would be too few, and a benchmark would see no idle end."""
    engine = SimpleNamespace(busy_s=0.0)
    counted: list[float] = []
    monkeypatch.setattr(actor, "HiddenStateEngine", lambda *args, **kwargs: engine)
    monkeypatch.setattr(actor.canary, "check", lambda it: setattr(it, "busy_s", 7.0))
    extractor: Any = object.__new__(HiddenStateExtractor)
    extractor.job = SimpleNamespace(poison=False, canary=True)
    extractor.metrics = SimpleNamespace(busy=counted.append)
    extractor.reporter = SimpleNamespace(set=lambda state: None)
    extractor.engine = extractor._start(None)
    state = EngineState("a", "n", 1)
    for now in (8.0, 10.0):
        engine.busy_s = now
        extractor._refresh(state)
    assert (counted, state.busy_s) == ([1.0, 2.0], 3.0)
