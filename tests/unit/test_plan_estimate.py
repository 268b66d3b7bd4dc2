"""What a run will take, before it starts."""

import os
from pathlib import Path

import pytest
from plans import build, job, tokens, write

from hs_ray.errors import OutputError
from hs_ray.inputs import iter_chunk, list_sources, split_sources
from hs_ray.plan import (
    build_plan,
    check_fits,
    estimate,
    format_estimate,
    measured_rate,
)
from hs_ray.plan.estimates import duration, size
from hs_ray.schema import CaptureSpec, Marker, marker_path
from hs_ray.storage import open_storage


def test_the_estimate(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 40, loss_mask=[0] * 10 + [1] * 30), tokens("b", 10), b"bad"])
    resolved = job(tmp_path)
    storage, summary = build(resolved)
    numbers = estimate(resolved, summary, storage, tokens_per_second=10)
    assert numbers["state_bytes"] == 50 * 32 < numbers["output_bytes"] and numbers["seconds"] == 5
    text = format_estimate(numbers)
    for part in (
        "lines      3 = 2 samples + 1 rejected + 0 blank",
        "malformed_json 1",
        "tokens     50 (80% learned), longest 40",
        "2 (output of layer 1); final: final_pre_norm",
        "<=      16 tokens          1",
        "5 s at 10 tokens/s",
        "GPUs",
    ):
        assert part in text, text
    check_fits(numbers | {"free_bytes": None})
    with pytest.raises(OutputError, match=r"output\.path = .*needs .*are free"):
        check_fits(numbers | {"free_bytes": 2 * 2**30})
    check_fits(numbers | {"free_bytes": 2 * 2**30}, committed_bytes=numbers["output_bytes"])
    unknown = estimate(resolved, summary, storage, None)
    assert unknown["seconds"] is None and "cluster.tokens_per_second" in format_estimate(unknown)


def test_the_time_is_for_what_is_left_and_all_engines(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 40), tokens("b", 10)])
    resolved = job(tmp_path)
    resolved.job.engine.tp_size = 8
    storage, summary = build(resolved)
    two = estimate(resolved, summary, storage, 10, replicas=2, device="cuda", done_tokens=10)
    assert two["seconds"] == 2 and two["gpus"] == 16
    assert "2 s at 10 tokens/s an engine, 2 engines\nGPUs       16 (2 x 8)" in format_estimate(two)
    assert estimate(resolved, summary, storage, 10, replicas=2, device="cpu")["gpus"] == 0
    assert "GPUs       8 an engine, as many" in format_estimate(estimate(resolved, summary, storage, 10))


def test_the_measured_rate_is_of_the_time_with_work_in_hand(tmp_path: Path) -> None:
    """Two engines; units overlap in one engine, and an hour of nothing lies between two starts."""
    storage = open_storage(str(tmp_path))
    markers = {}
    spans = [("a", 0, 10), ("a", 2, 12), ("b", 0, 6), ("a", 3612, 3618), ("a", 3613, 3615)]  # 12 + 6 + 6 seconds
    for unit, (engine, start, end) in enumerate(spans):
        markers[unit] = Marker(unit, "", 1, "", None, 0, "", 1, 1, 120, engine=engine, seconds=end - start)
        storage.write(marker_path(unit), b"{}")
        os.utime(tmp_path / marker_path(unit), (1e9, 1e9 + end))
    assert measured_rate(storage, markers) == pytest.approx(5 * 120 / 24)
    assert measured_rate(storage, {}) is None


def test_a_dry_run_counts_the_same_and_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [tokens(str(i % 90), 1 + i % 60) for i in range(100)] + [b"bad"])
    resolved = job(tmp_path)
    _, summary = build(resolved)
    chunks = split_sources(list_sources(resolved.job.input), 500)
    tables = (table for chunk in chunks for table in iter_chunk(chunk, resolved.tokenize_settings))
    assert build_plan(None, tables, resolved) == summary and summary.rejected == 11 and summary.units > 50


def test_the_kimi_experiment_is_five_terabytes() -> None:
    """37,312 samples, 87.8 M tokens, four states a token of 7,168 numbers."""
    spec = CaptureSpec((3, 31, 59), "pre_norm", 61, 7168)
    assert size(87_800_000 * spec.bytes_per_token) == "5.03 TB"
    assert duration(87_800_000 / 2612) == "9 h 20 min" and duration(59) == "59 s" and duration(600) == "10 min"
