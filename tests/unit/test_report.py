"""hs_ray.report: the figures of a known output, and a page that needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from make_output import H, MadeOutput, make_output

from hs_ray.errors import OutputError
from hs_ray.pipeline.board import EngineState
from hs_ray.pipeline.history import MOST_POINTS, History
from hs_ray.report import REPORT, collect, page, write_report
from hs_ray.report.charts import compact, nice
from hs_ray.schema import PROGRESS
from hs_ray.storage import Storage, open_storage

VOID = {"meta", "line", "path", "rect"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    """With the history of two drivers: 100 s at 50 tokens/s and half busy, then 60 s at 100 and all busy."""
    output = make_output(tmp_path_factory.mktemp("report") / "out")
    write_history(output.path, 1, [[1000.0 + t, 50 * t, t / 2, 1] for t in range(0, 101, 10)])
    write_history(output.path, 2, [[9000.0 + t, 100 * t, t, 1] for t in range(0, 61, 10)])
    return output


def write_history(path: Path, epoch: int, points: list[list[float]]) -> None:
    file = path / PROGRESS / f"{epoch:06d}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    engines = {f"node-{epoch}": {"node": "10.0.0.1", "busy_s": points[-1][2], "waited_s": 0.0}}
    file.write_text(json.dumps({"epoch": epoch, "engines": 1, "points": points, "by_engine": engines}))


def test_figures(made: MadeOutput) -> None:
    facts = collect(open_storage(str(made.path)))
    tokens = sum(made.samples[i].num_tokens for i in made.committed)
    assert (facts.samples, facts.tokens, facts.units, facts.complete, len(facts.failed)) == (11, tokens, 3, True, 1)
    assert facts.rejects_by_code == {"not_json": 2, "engine_error": 1}
    assert [len(facts.examples[code]) for code in ("not_json", "engine_error")] == [2, 1]
    assert list(facts.columns) == list(made.spec.columns)
    assert facts.columns["hidden_4"].rows == tokens
    assert facts.columns["hidden_4"].rms(H) > 0


def test_drivers_follow_each_other_whatever_lay_between(made: MadeOutput) -> None:
    facts = collect(open_storage(str(made.path)))
    assert facts.seconds == pytest.approx(160)
    assert facts.restarts == [pytest.approx(100)]
    assert {(span.rate, span.busy) for span in facts.spans} == {(50.0, 0.5), (100.0, 1.0)}
    assert {engine.name for engine in facts.engines} >= {"node-1", "node-2"}


class Balance(HTMLParser):
    """Every tag that opens closes; no attribute fetches anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_page_stands_alone(made: MadeOutput) -> None:
    text = page(collect(open_storage(str(made.path))))
    parser = Balance()
    parser.feed(text)
    assert (parser.open, parser.fetched) == ([], [])
    assert not re.search(r"https?:|<script|@import|url\(|<link", text)
    assert "color-scheme: light dark" in text
    for title in ("Tokens per second", "Engines busy", "Samples by length", "Lines without states", "States", "Sizes"):
        assert title in text or title == "Samples by length"  # the made plan has no histogram
    assert "output of layer 3" in text and "not_json" in text and "0.5.23" in text and "jobs/extract.py" in text


def test_what_came_from_outside_is_escaped(tmp_path: Path) -> None:
    made = make_output(tmp_path / "out")
    path = made.path / "_run/run.json"
    run = json.loads(path.read_text())
    evil = "<script>alert(1)</script>"
    run["model"]["name"] = run["command"][0] = run["versions"]["sglang"] = evil
    run["plan"] |= {"rejects_by_code": {evil: 2}, "length_histogram": [[64, 12]], "learned_tokens": 3}
    path.write_text(json.dumps(run))
    text = page(collect(open_storage(str(made.path))))
    assert "<script" not in text and text.count("&lt;script&gt;") >= 4
    assert "Samples by length" in text and "Tokens per second" not in text  # no history: no chart


def test_unfinished_and_absent(tmp_path: Path) -> None:
    made = make_output(tmp_path / "out", complete=False)
    storage = open_storage(str(made.path))
    assert write_report(storage) == f"{storage.root}/{REPORT}"
    assert "unfinished" in (made.path / REPORT).read_text()
    with pytest.raises(OutputError, match=r"run\.json"):
        collect(open_storage(str(tmp_path / "nothing")))


def test_axes() -> None:
    assert [nice(value) for value in (0, 0.07, 1, 3.2, 950, 38_900)] == [1.0, 0.08, 1.0, 4.0, 1000.0, 40_000.0]
    assert [compact(value) for value in (0, 12.34, 12_345, 1.27e9)] == ["0", "12.3", "12.3k", "1.27G"]


def test_history_is_bounded_and_keeps_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("hs_ray.pipeline.history.time.time", lambda: clock[0])
    storage: Storage = open_storage(str(tmp_path))
    history = History(storage, 1, 1)
    for step in range(5 * MOST_POINTS):
        clock[0] = 1000.0 + 5 * step
        history.add(500 * step, [(0.0, EngineState("a", "n", 1, state="running", busy_s=2.5 * step))])
    history.save()
    points = json.loads((tmp_path / PROGRESS / "000001.json").read_text())["points"]
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS
    for (t0, tokens0, busy0, _), (t1, tokens1, busy1, _) in zip(points, points[1:], strict=False):
        assert ((tokens1 - tokens0) / (t1 - t0), (busy1 - busy0) / (t1 - t0)) == (100.0, 0.5)
