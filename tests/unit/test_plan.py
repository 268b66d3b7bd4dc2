"""Units, duplicates, counts, fingerprint, estimate; the same plan byte for byte whatever the chunks and the order."""

import dataclasses
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from s3 import Bucket

from hs_ray.config import Compression, ExtractJob, OnTooLong
from hs_ray.errors import ConfigError, InputError, OutputError
from hs_ray.inputs import iter_chunk, list_sources, split_sources
from hs_ray.model import ModelInfo
from hs_ray.pipeline.actor import UnitError
from hs_ray.plan import (
    PlanSummary,
    ResolvedJob,
    build_plan,
    check_fits,
    check_rejected,
    differing_keys,
    estimate,
    fingerprint,
    format_estimate,
    load_run,
    load_summary,
    measured_rate,
    read_unit,
    resolve,
    unit_counts,
    write_run,
)
from hs_ray.plan.estimates import duration, size
from hs_ray.plan.files import part_path
from hs_ray.schema import MAX_CELL_BYTES, REJECTED, SAMPLES, CaptureSpec, Marker, marker_path
from hs_ray.storage import Storage, open_storage

MODEL = ModelInfo("m", "/m", None, "LlamaForCausalLM", 12, 8, 100, 64, "digest", "/m")


def job(tmp_path: Path, **changes: Any) -> ResolvedJob:
    """Two columns of 8 numbers: 32 bytes a token; a unit of 320 bytes is 10 tokens."""
    made = ExtractJob(max_seq_len=64)
    made.input.path = str(tmp_path / "in")
    made.output.path = str(tmp_path / "out")
    made.output.shard_bytes = "320"
    for key, value in changes.items():
        node, name = (
            (made, key) if hasattr(made, key) else (made.input if hasattr(made.input, key) else made.output, key)
        )
        setattr(node, name, value)
    return ResolvedJob(made, MODEL, CaptureSpec((2,), "pre_norm", 12, 8))


def write(tmp_path: Path, lines: list[Any], name: str = "a.jsonl") -> None:
    """Lines given as records, or raw."""
    (tmp_path / "in").mkdir(exist_ok=True)
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    (tmp_path / "in" / name).write_bytes(data)


def build(resolved: ResolvedJob, chunk_bytes: int = 2**20, table_bytes: int = 2**20) -> tuple[Storage, PlanSummary]:
    storage = open_storage(str(resolved.job.output.path))
    sources = list_sources(resolved.job.input)
    tables = (
        table
        for chunk in split_sources(sources, chunk_bytes)
        for table in iter_chunk(chunk, resolved.tokenize_settings, table_bytes)
    )
    return storage, build_plan(storage, tables, resolved)


def units(storage: Storage, summary: PlanSummary) -> list[list[str]]:
    return [[s.sample_id for s in read_unit(storage, u, summary.units_per_file)] for u in range(summary.units)]


def tokens(id: str | None, count: int, **extra: Any) -> dict[str, Any]:
    return ({"id": id} if id else {}) | {"input_ids": list(range(count)), **extra}


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


def test_a_missing_part_says_which(tmp_path: Path) -> None:
    write(tmp_path, [tokens("a", 3)])
    storage, summary = build(job(tmp_path))
    storage.write(f"{SAMPLES}/part-00000.parquet", b"PAR1")
    with pytest.raises(OutputError, match=r"part-00000\.parquet, the plan of unit-000000, cannot be read"):
        read_unit(storage, 0, summary.units_per_file)
    storage.remove(f"{SAMPLES}/part-00000.parquet")
    with pytest.raises(OutputError, match=r"No such file or directory.*restore the file"):
        read_unit(storage, 0, summary.units_per_file)


def test_a_disk_that_is_unwell_is_no_missing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be restored: the actor tries the unit again."""
    write(tmp_path, [tokens("a", 3)])
    storage, summary = build(job(tmp_path))

    def fails(path: str) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "open", fails)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read_unit(storage, 0, summary.units_per_file)
    assert str(UnitError(caught.value)).startswith(UnitError.TRANSIENT)


@pytest.mark.integration
def test_nor_is_a_store(tmp_path: Path, s3: Bucket) -> None:
    """Whether it fails when the file is opened, or while Arrow reads in it."""
    write(tmp_path, [tokens("a", 3)])
    built, summary = build(job(tmp_path))
    storage = s3.storage(retry_seconds=0.2)
    storage.write(part_path(0), built.read_bytes(part_path(0)))
    for request in ("HEAD", "GET"):
        s3.fault(request, "status", times=999)
        with pytest.raises(OSError, match=r"still failing after"):
            read_unit(storage, 0, summary.units_per_file)
        s3.faults.clear()
    assert read_unit(storage, 0, summary.units_per_file)[0].sample_id == "a"


@pytest.fixture
def real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelInfo:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    model = dataclasses.replace(MODEL, path=str(folder), tokenizer_path=str(folder))
    monkeypatch.setattr("hs_ray.plan.resolved.resolve_model", lambda config, weights: model)
    return model


def test_resolve_reports_all_problems_at_once(tmp_path: Path, real_model: ModelInfo) -> None:
    wrong = ExtractJob(layers=[3, 99], max_seq_len=65)
    wrong.model.chat_template = "/none.jinja"
    with pytest.raises(ConfigError) as caught:
        resolve(wrong)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == [
        "layers",
        "max_seq_len",
        "model.chat_template",
    ]
    assert resolve(ExtractJob(layers=[3, 2], max_seq_len=64)).spec == CaptureSpec((2, 3), "pre_norm", 12, 8)


CHANGES: list[tuple[str, Any]] = [
    ("layers", [2, 3]),
    ("max_seq_len", 63),
    ("on_too_long", OnTooLong.reject),
    ("limit", 5),
    ("id_key", "uuid"),
    ("allow_empty_mask", True),
    ("compression", Compression.split_zstd),
]


def test_the_fingerprint_names_the_keys_that_differ(tmp_path: Path, real_model: ModelInfo) -> None:
    write(tmp_path, [tokens("a", 3)])

    def made(
        sglang: str = "0.5.23", capture: str = "native", args: dict[str, Any] | None = None, **changes: Any
    ) -> tuple[str, dict[str, str]]:
        changed = job(tmp_path, **({"layers": [2]} | changes)).job
        changed.engine.args = args or {}
        resolved = resolve(changed)
        versions = {"sglang": sglang, "patch": "p", "capture": capture, "torch": "t"}
        return fingerprint(resolved, list_sources(changed.input), versions)

    first, parts = made()
    assert len(first) == 64 and made() == (first, parts)
    for key, value in CHANGES:
        other, changed = made(**{key: value})
        [difference] = differing_keys(parts, changed)
        assert other != first and difference.split(" = ")[0].endswith(key) and "(was " in difference
    assert "sglang = 0.5.24 (was 0.5.23)" in differing_keys(parts, made("0.5.24")[1])
    assert differing_keys(parts, made(capture="hook")[1]) == ["engine/models = hook (was native)"]
    assert made(args={"log_level": "info"})[0] == first != made(args={"quantization": "fp8"})[0]
    assert made(max_rejected=0.5, shard_bytes="1GiB", path=str(tmp_path / "in" / "a.jsonl"))[0] == first
    write(tmp_path, [tokens("a", 4)])
    assert [d.split(" = ")[0] for d in differing_keys(parts, made()[1])] == ["input.path"]


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
