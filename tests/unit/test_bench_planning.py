"""The made-up inputs of the planning bench, and its table."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hs_ray.bench import corpus, planning
from hs_ray.bench.planning import Planned, format_rows
from hs_ray.config import ExtractJob
from hs_ray.inputs import list_sources, read_chunk, split_sources
from hs_ray.inputs.read import SAMPLE
from hs_ray.plan import resolve


def test_lengths_add_up_and_are_those_of_chats() -> None:
    lengths = corpus.chat_lengths(37_312, 87_800_000, 8192)
    assert len(lengths) == 37_312 and lengths.sum() == 87_800_000
    assert lengths.min() >= 16 and lengths.max() == 8192
    assert 1500 < np.median(lengths) < 2200 < lengths.mean() and (lengths == 8192).mean() < 0.05
    assert (corpus.chat_lengths(37_312, 87_800_000, 8192) == lengths).all()
    for samples, tokens in ((2, 32), (2, 200), (3, 199)):
        assert corpus.chat_lengths(samples, tokens, 100).sum() == tokens
    with pytest.raises(ValueError, match="cannot have 201"):
        corpus.chat_lengths(2, 201, 100)


def test_both_kinds_are_good_input(tmp_path: Path) -> None:
    corpus.write_tokens(tmp_path / "tokens.jsonl", [2, 10, 1000], 49152)
    corpus.write_chats(tmp_path / "chats.jsonl", 20)
    job = ExtractJob(dry_run=True)
    job.input.path = str(tmp_path)
    settings = resolve(job).tokenize_settings
    chats, tokens = (read_chunk(chunk, settings) for chunk in split_sources(list_sources(job.input)))
    assert set(chats["kind"].to_pylist()) == set(tokens["kind"].to_pylist()) == {SAMPLE}
    assert [sum(mask) for mask in tokens["loss_mask"].to_pylist()] == [1, 6, 600]
    lengths = [len(ids) for ids in chats["input_ids"].to_pylist()]
    assert 500 < np.mean(lengths) < 3000 and len(set(lengths)) > 15
    turns = [len(json.loads(line)["messages"]) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert set(turns) == {3, 5, 7, 9}


def test_table() -> None:
    text = format_rows([Planned("chats", 2, 1000, 2_000_000, 10.0, 1.5, 8.25, 300_000_000, 1_234_000_000)])
    assert text.splitlines()[1].split() == [
        "chats", "2", "1,000", "2,000,000", "10.0", "100", "200,000", "1.5", "8.2", "300", "1,234",
    ]  # fmt: skip


def test_the_work_of_readers_that_have_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SAMPLE_EVERY_S", 0.02)
    with planning._Watch() as watch:
        before = watch.others_s  # of the tests' own servers
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"], check=True)
    assert watch.others_s - before > 0.2
    assert watch.driver_bytes > 0 and watch.all_bytes > 0
