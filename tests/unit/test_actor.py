"""What the actor reports of its engine; its work is tried in tests/integration and tests/faults."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hs_ray.engine.start_errors import EngineStartError
from hs_ray.pipeline import actor
from hs_ray.pipeline.actor import HiddenStateExtractor
from hs_ray.pipeline.board import EngineState


@dataclass(frozen=True)
class Options:
    """What is asked of an EngineOptions here."""

    model_path: str = ""


@pytest.mark.parametrize(("first_here", "checked"), [(True, 8 * 100), (False, 100)])
def test_one_that_is_started_again_needs_its_own_scratch(
    first_here: bool, checked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seven neighbours have taken theirs: refused for the room of all eight, a death would be the run's end."""
    seen: list[tuple[int, int]] = []
    info = SimpleNamespace(digest="d", name="m")
    monkeypatch.setattr(actor, "resolve_model", lambda model: info)
    monkeypatch.setattr(actor, "local_weights", lambda info: "/weights")
    monkeypatch.setattr(actor, "engines_of_this_node", lambda engines, options: engines)
    monkeypatch.setattr(actor, "check_scratch", lambda storage, need, min_free: seen.append((need, min_free)))
    monkeypatch.setattr(actor, "fit_ring", lambda options, memory: options)
    extractor: Any = object.__new__(HiddenStateExtractor)
    job = {"model": None, "model_digest": "d", "storage": None, "engines": 8, "scratch_bytes": 100}
    extractor.job = SimpleNamespace(options=Options(), min_free_bytes=7, **job)
    assert extractor._options(first_here).model_path == "/weights"
    assert seen == [(checked, 7)]


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


class DiedError(Exception):
    """In place of the signal."""


@pytest.mark.parametrize("ran", ["here", "elsewhere", "never"])
def test_an_engine_that_cannot_start(ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without a working GPU must not end the run of the others; one whose engine has died gets another try."""
    error, said = EngineStartError("no memory"), []

    def die(reason: str) -> None:
        raise DiedError(reason)

    monkeypatch.setattr(actor, "has_run_on", lambda board, node: ran == "here")
    monkeypatch.setattr(actor, "has_run", lambda board: ran == "elsewhere")
    monkeypatch.setattr(actor, "wait_while_others_go_on", lambda board: said.append("waited"))
    monkeypatch.setattr(actor, "_die", die)
    extractor: Any = object.__new__(HiddenStateExtractor)
    extractor.reporter = SimpleNamespace(set=lambda state, detail: said.append(state))
    if ran != "never":
        with pytest.raises(DiedError, match="no memory"):
            extractor._stay_out(error, None, "node")
        assert said == []
    else:
        extractor._stay_out(error, None, "node")
        assert said == [actor.STUCK, "waited"]
