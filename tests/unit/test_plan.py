"""Units, duplicates, counts; the same plan byte for byte whatever the chunks and the order."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from plans import build, job, tokens, units, write

from hs_ray.errors import InputError, OutputError
from hs_ray.inputs import iter_chunk, list_sources, split_sources
from hs_ray.plan import (
    build_plan,
    check_rejected,
    load_run,
    load_summary,
    read_unit,
    unit_counts,
    write_run,
)
from hs_ray.schema import MAX_CELL_BYTES, REJECTED, SAMPLES
from hs_ray.storage import Storage, open_storage


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 3, loss_mask=[0, 1, 1]), b"", tokens("b", 2)])
    storage, summary = build(job(tmp_path))
    [a, b] = read_unit(storage, 0, summary.units_per_file)
    assert (a.sample_id, a.source, a.line, a.num_tokens) == ("a", "a.jsonl", 0, 3)
    assert (b.sample_id, b.source, b.line) == ("b", "a.jsonl", 2)
    assert a.input_ids.dtype == np.int32 and a.input_ids.tolist() == [0, 1, 2]
    assert a.loss_mask.dtype == np.uint8 and a.loss_mask.tolist() == [0, 1, 1] and b.loss_mask.tolist() == [1, 1]


def test_units_end_at_the_border_nearest_to_a_multiple(tmp_path: Path) -> None:
    """Of 10 tokens each. A sample belongs to where its middle falls."""
    write(tmp_path, [tokens(name, count) for name, count in zip("abcdefg", (4, 4, 6, 6, 1, 35, 3), strict=True)])
    #   middles: a 2, b 6, c 11, d 17, e 20.5 -> 20, f 38.5 -> 38, g 57
    storage, summary = build(job(tmp_path))
    assert units(storage, summary) == [["a", "b"], ["c", "d"], ["e"], ["f"], ["g"]]
    assert unit_counts(storage, summary.units, summary.units_per_file) == [(2, 8), (2, 12), (1, 1), (1, 35), (1, 3)]
    assert summary.largest_unit_tokens == 35


def test_units_are_of_equal_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write(tmp_path, [tokens(None, int(n)) for n in rng.integers(1, 64, 500)])
    storage, summary = build(job(tmp_path, shard_bytes="16000"))  # 500 tokens
    counts = unit_counts(storage, summary.units, summary.units_per_file)
    assert summary.units == -(-summary.tokens // 500)
    assert all(abs(count - 500) <= 64 for _, count in counts[:-1])


def test_files_hold_one_row_group_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_ray.plan.files.UNITS_PER_FILE", 2)
    monkeypatch.setattr("hs_ray.plan.files.part_path", lambda unit: f"{SAMPLES}/part-{unit // 2:05d}.parquet")
    write(tmp_path, [tokens(str(i), 10) for i in range(5)])
    storage, summary = build(job(tmp_path))
    paths = [info.path for info in storage.list(SAMPLES)]
    assert [pq.ParquetFile(storage.open(path)).num_row_groups for path in paths] == [2, 2, 1]
    assert [[s.sample_id for s in read_unit(storage, u, 2)] for u in range(5)] == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert unit_counts(storage, 5, 2) == [(1, 10)] * 5
    table = pq.read_table(storage.open(paths[1]))
    assert table.column_names == ["sample_id", "source", "line", "input_ids", "loss_mask", "unit"]
    assert table["unit"].to_pylist() == [2, 3]


def digest(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*.parquet"))
    }


def test_the_same_plan_byte_for_byte(tmp_path: Path) -> None:
    """Whatever the chunks, the tables and the order in which files are named."""
    rng = np.random.default_rng(0)
    for name in ("a.jsonl", "b.jsonl"):
        write(
            tmp_path,
            [
                tokens(None if i % 3 else f"{name}{i}", int(n)) if i % 7 else b"bad"
                for i, n in enumerate(rng.integers(1, 64, 300))
            ],
            name,
        )
    both = [str(tmp_path / "in" / name) for name in ("a.jsonl", "b.jsonl")]
    made = []
    for i, (chunk_bytes, table_bytes, paths) in enumerate(
        [(2**20, 2**20, both), (1000, 2**20, both[::-1]), (777, 100, str(tmp_path / "in"))]
    ):
        resolved = job(tmp_path, path=paths)
        resolved.job.output.path = str(tmp_path / f"out{i}")
        resolved.job.output.shard_bytes = "10000"
        _, summary = build(resolved, chunk_bytes, table_bytes)
        made.append((digest(tmp_path / f"out{i}"), summary))
    assert len(made[0][0]) >= 2 and made[0] == made[1] == made[2]


def test_lines_without_an_id_get_a_hash_of_source_and_line(tmp_path: Path) -> None:
    write(tmp_path, [tokens(None, 2), tokens(None, 2)])
    storage, summary = build(job(tmp_path))
    want = [hashlib.sha256(f"a.jsonl\0{line}".encode()).hexdigest()[:20] for line in (0, 1)]
    assert units(storage, summary) == [want]


def rejects(storage: Storage) -> list[tuple[Any, ...]]:
    return [tuple(row.values())[:4] for row in pq.read_table(storage.open(REJECTED)).to_pylist()]


def test_the_second_of_two_equal_ids_is_a_reject_also_across_files(tmp_path: Path) -> None:
    write(tmp_path, [tokens("x", 2), tokens("y", 2), tokens("x", 3)], "a.jsonl")
    write(
        tmp_path,
        [tokens("y", 2), tokens("z", 2), {"id": 5, "input_ids": [1]}, {"id": "5", "input_ids": [1]}],
        "b.jsonl",
    )
    storage, summary = build(job(tmp_path), chunk_bytes=20)
    assert sum(units(storage, summary), []) == ["x", "y", "z", "5"]
    assert rejects(storage) == [
        ("x", "a.jsonl", 2, "duplicate_id"),
        ("y", "b.jsonl", 0, "duplicate_id"),
        ("5", "b.jsonl", 3, "duplicate_id"),
    ]
    assert summary.rejects_by_code == {"duplicate_id": 3}


def test_the_id_of_a_reject_is_free(tmp_path: Path) -> None:
    write(tmp_path, [{"id": "x", "input_ids": []}, tokens("x", 2)])
    storage, summary = build(job(tmp_path))
    assert units(storage, summary) == [["x"]] and rejects(storage) == [("x", "a.jsonl", 0, "empty")]


def test_counts(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 3, loss_mask=[0, 0, 1]), b"", b"bad", tokens("b", 99), b"{}", tokens("a", 1), b" "])
    _, summary = build(job(tmp_path))
    assert summary.lines == 7 == summary.samples + summary.rejected + summary.blank
    assert (summary.samples, summary.rejected, summary.blank, summary.truncated) == (2, 3, 2, 1)
    assert (summary.tokens, summary.learned_tokens, summary.longest_tokens) == (67, 65, 64)
    assert summary.rejects_by_code == {"duplicate_id": 1, "malformed_json": 1, "missing_key": 1}
    assert [(e["line"], e["code"]) for e in summary.examples] == [
        (2, "malformed_json"),
        (4, "missing_key"),
        (5, "duplicate_id"),
    ]
    assert summary.length_histogram == [[4, 1], [64, 1]]
    assert summary.state_bytes == 67 * 32


def test_rows_count_the_pieces_of_long_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_CELL_BYTES == 2**28
    for module in ("schema", "plan.build"):
        monkeypatch.setattr(f"hs_ray.{module}.MAX_CELL_BYTES", 16 * 10)
    write(tmp_path, [tokens("a", n) for n in (10,)] + [tokens("b", 11), tokens("c", 30)])
    resolved = job(tmp_path)
    _, summary = build(resolved)
    assert summary.rows == 1 + 2 + 3 == sum(len(resolved.spec.pieces(n)) for n in (10, 11, 30))


def test_limit_is_of_the_whole_input(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 1), b"", tokens("b", 1)], "a.jsonl")
    write(tmp_path, [tokens("c", 1), tokens("d", 1)], "b.jsonl")
    for chunk_bytes in (10, 2**20):
        storage, summary = build(job(tmp_path, limit=4), chunk_bytes)
        assert units(storage, summary) == [["a", "b", "c"]] and summary.lines == 4


def test_nothing_is_left_of_a_plan_that_was_cut_off(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 1)])
    storage = open_storage(str(tmp_path / "out"))
    storage.write(f"{SAMPLES}/part-00007.parquet", b"old")
    resolved = job(tmp_path)

    def broken() -> Any:
        yield from iter_chunk(split_sources(list_sources(resolved.job.input))[0], resolved.tokenize_settings)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        build_plan(storage, broken(), resolved)
    assert storage.list("_run/tmp") == [] and load_run(storage) is None
    _, summary = build(resolved)
    assert [info.path for info in storage.list(SAMPLES)] == [f"{SAMPLES}/part-00000.parquet"] and summary.units == 1


def test_no_samples_at_all(tmp_path: Path) -> None:
    for lines in ([], [b"bad"]):
        write(tmp_path, lines)
        storage, summary = build(job(tmp_path))
        assert summary.units == 0 and storage.list(SAMPLES) == [] and unit_counts(storage, 0, 64) == []
        with pytest.raises(InputError):
            check_rejected(summary, 1.0)


def test_too_many_rejects(tmp_path: Path) -> None:
    write(tmp_path, [tokens(None, 1)] * 98 + [b"bad", b"{}"] + [b""] * 900)
    _, summary = build(job(tmp_path))
    check_rejected(summary, 0.02)
    with pytest.raises(InputError) as caught:
        check_rejected(summary, 0.01)
    text = str(caught.value)
    assert text.startswith(
        "input.max_rejected = 0.01: 2 of 100 lines (2.00%) are unusable (malformed_json 1, missing_key 1)"
    )
    assert "a.jsonl, line 98: malformed_json:" in text and "a.jsonl, line 99: missing_key:" in text


def test_run_json(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 3)])
    resolved = job(tmp_path)
    storage, summary = build(resolved)
    assert load_run(storage) is None
    sources = list_sources(resolved.job.input)
    run = write_run(storage, resolved, summary, sources, ("f" * 64, {"layers": "[2]"}), {"sglang": "0.5.23"})
    assert load_run(storage) == run and load_summary(run) == summary
    assert run["spec"]["layers"] == [{"id": 2, "output_of_layer": 1, "column": "hidden_2"}]
    assert run["model"]["vocab_size"] == 100 and run["sources"][0]["format"] == "tokens"
    for broken in (b"{", b'{"format_version": 99}', b"[]"):
        storage.write("_run/run.json", broken)
        with pytest.raises(OutputError, match=r"run\.json"):
            load_run(storage)
