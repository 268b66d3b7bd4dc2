"""hs_ray.verify: every kind of damage is found, also where checksum, size and statistics were made to fit."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_output import (
    H,
    MadeOutput,
    fit_marker,
    flip_byte,
    make_output,
    read_marker,
    rewrite,
    true_states,
    write_manifest,
)

from hs_ray import schema
from hs_ray.errors import ConfigError, OutputError
from hs_ray.reader import HiddenStatesDataset
from hs_ray.storage import open_storage
from hs_ray.verify import verify_argmax, verify_integrity, verify_reference
from hs_ray.verify.argmax import output_matrix
from hs_ray.verify.content import own_token_scores
from hs_ray.verify.rows import measure, repeated_rows, shared_prefix, stats_differ

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    return make_output(tmp_path_factory.mktemp("verify") / "out")


@pytest.fixture
def made(base: MadeOutput, tmp_path: Path) -> MadeOutput:
    """A copy that a test may damage."""
    return dataclasses.replace(base, path=Path(shutil.copytree(base.path, tmp_path / "out")))


def found(made: MadeOutput, **options: Any) -> dict[str, list[str]]:
    """Problems of the integrity check: file and text by check."""
    problems: dict[str, list[str]] = {}
    for problem in verify_integrity(open_storage(str(made.path)), **options).problems:
        problems.setdefault(problem.check, []).append(f"{problem.file}: {problem.detail}")
    return problems


@pytest.mark.parametrize("compression", ["none", "split_zstd"])
def test_a_sound_output_passes(tmp_path: Path, compression: str):
    made = make_output(tmp_path / "out", layers=(0, 2, 8), final="both", compression=compression)
    report = verify_integrity(open_storage(str(made.path)))
    assert report.problems == []
    assert report.counts["samples"] == 11 and report.counts["failed"] == 1 and report.counts["rejected"] == 2
    assert report.counts["tokens"] == sum(made.samples[i].num_tokens for i in made.committed)


def test_pieces_pass_and_a_lost_piece_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schema, "MAX_CELL_BYTES", 50 * H * 2)
    made = make_output(tmp_path / "out", lengths=[40, 101, 50, 7, 150, 3])
    assert found(made) == {}
    rewrite(made, 0, lambda rows: rows[:2] + rows[3:])
    assert "('id-1', 50)" in found(made)["coverage"][0]


# ---- the five kinds of damage: as they happen, and with the marker made to fit ----


def flip_a_state(made: MadeOutput) -> None:
    column = pq.ParquetFile(made.shard(0)).metadata.row_group(0).column(8)
    flip_byte(made.shard(0), column.data_page_offset + column.total_compressed_size - 1001)  # a high byte


def test_flipped_byte(made: MadeOutput):
    flip_a_state(made)
    assert "unit-000000" in found(made)["checksum"][0]


def test_flipped_byte_that_fits_the_checksum(made: MadeOutput):
    flip_a_state(made)
    fit_marker(made, read_marker(made, 0))
    write_manifest(made)
    assert "row 0 cannot be read" in found(made)["file"][0]  # the pages carry checksums of their own


def test_changed_byte_that_fits_every_checksum(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        largest = int(np.argmax(rows[0]["hidden_2"][20] & 0x7FFF))
        rows[0]["hidden_2"][20, largest] ^= 0x8000  # its sign: no statistic sees it
        return rows

    rewrite(made, 0, change)
    assert found(made) == {}
    problems = verify_reference(str(made.path), samples=99).problems
    assert any("sample 'id-0', column hidden_2" in problem.detail for problem in problems)


def test_flipped_byte_in_the_ids(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        rows[0]["input_ids"] = rows[0]["input_ids"].copy()
        rows[0]["input_ids"][3] ^= 1
        return rows

    rewrite(made, 0, change)
    assert "sample 'id-0': input_ids" in found(made)["plan"][0]


def test_missing_row(made: MadeOutput):
    rewrite(made, 0, lambda rows: rows[:2] + rows[3:])
    problems = found(made)
    assert "('id-2', 0)" in problems["coverage"][0]
    assert "10 committed + 1 failed" in problems["conservation"][0]


def test_swapped_rows(made: MadeOutput):
    rewrite(made, 0, lambda rows: [rows[1], rows[0], *rows[2:]])
    assert found(made).keys() == {"plan"}


def test_swapped_states_are_found_by_value(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        a, b = rows[0], rows[1]  # 90 and 40 tokens
        for name in made.spec.columns:
            a[name][:40], b[name][:] = b[name].copy(), a[name][:40].copy()
        return rows

    rewrite(made, 1, change)
    details = [p.detail for p in verify_reference(str(made.path), samples=99).problems]
    assert any("'id-4'" in text for text in details) and any("'id-5'" in text for text in details)


def test_states_of_another_sample(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        for name in made.spec.columns:
            rows[0][name] = made.states[5][name].copy()  # both have 40 tokens
        return rows

    rewrite(made, 0, change)
    assert "sample 'id-5' has states of 'id-0'" in found(made)["repeated"][0]


def test_layer_shifted_by_one(made: MadeOutput):
    shifted = true_states(made.model, made.samples, dataclasses.replace(made.spec, layers=(3,)))
    number = {sample.sample_id: i for i, sample in enumerate(made.samples)}

    def change(rows: Rows) -> Rows:
        for row in rows:
            row["hidden_2"] = shifted[number[row["sample_id"]]]["hidden_3"]
        return rows

    rewrite(made, 1, change)  # in one shard: its samples begin as others do, and yet their states differ there
    assert all("column hidden_2: begins with the tokens of" in text for text in found(made)["prefix"])
    for unit in (0, 2):
        rewrite(made, unit, change)
    assert found(made) == {}  # everywhere: only the values tell
    problems = verify_reference(str(made.path), samples=4).problems
    assert problems and all("column hidden_2" in problem.detail for problem in problems)


def test_one_column_in_place_of_another(made: MadeOutput):
    rewrite(made, 1, lambda rows: [row | {"hidden_4": row["hidden_5"]} for row in rows])
    assert "columns hidden_4 and hidden_5 hold the same states" in found(made)["columns"][0]


def test_zeroed_sample(made: MadeOutput):
    rewrite(
        made, 2, lambda rows: [rows[0] | {name: np.zeros_like(rows[0][name]) for name in made.spec.columns}, *rows[1:]]
    )
    assert "sample 'id-8', column hidden_2: 50 of 50 tokens are all zero" in found(made)["zeros"][0]


# ---- other damage ----


@pytest.mark.parametrize("value", [0x7F80, 0x7FC0])  # infinity, NaN
def test_nonfinite(made: MadeOutput, value: int):
    def change(rows: Rows) -> Rows:
        rows[0]["hidden_4"][7, 3] = value
        return rows

    rewrite(made, 2, change)
    assert "column hidden_4: 1 of 50 tokens hold a NaN" in found(made)["nonfinite"][0]


def test_repeated_token(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        rows[0]["hidden_4"][20] = rows[0]["hidden_4"][21]
        return rows

    rewrite(made, 2, change)
    assert "the different tokens 20 and 21 have the same state" in found(made)["repeated"][0]


def test_wrong_width(made: MadeOutput):
    rewrite(made, 2, lambda rows: [rows[0] | {"hidden_4": rows[0]["hidden_4"][:-1]}, *rows[1:]])
    assert f"6272 bytes; 50 tokens * 64 * 2 = {50 * 64 * 2}" in found(made)["width"][0]


def test_statistics_of_the_marker_count(made: MadeOutput):
    rewrite(made, 2, lambda rows: [rows[0] | {"hidden_4": rows[0]["hidden_5"] ^ 0x8000}, *rows[1:]], stats=False)
    assert "column hidden_4" in found(made)["statistics"][0]


def test_files(made: MadeOutput):
    pq.write_table(pa.table({"a": [1]}), made.path / "shards/mine.parquet")
    made.shard(1).unlink()
    (made.path / schema.marker_path(2)).write_text("{}")
    problems = found(made)
    assert "shards/mine.parquet" in problems["foreign"][0]
    assert any("unit-000001" in text for text in problems["file"])
    assert any("unit-000002.json: cannot be read" in text for text in problems["marker"])


def test_damaged_manifest_and_lost_reject(made: MadeOutput):
    rejects = made.path / "_rejects/rejects.jsonl"
    rejects.write_text("\n".join(rejects.read_text().splitlines()[1:]))
    manifest = json.loads((made.path / schema.MANIFEST).read_text())
    manifest["counts"]["tokens"] += 1
    manifest["shards"][1]["sha256"] = "0" * 64
    (made.path / schema.MANIFEST).write_text(json.dumps(manifest))
    problems = found(made)
    assert any("2 entries" in text for text in problems["conservation"])
    assert any("tokens is" in text for text in problems["conservation"])
    assert "sha256" in problems["manifest"][0]


def test_another_fingerprint(made: MadeOutput):
    run = made.path / schema.RUN_JSON
    run.write_text(run.read_text().replace("f" * 64, "e" * 64))
    problems = found(made)
    assert len(problems["fingerprint"]) == 3 and len(problems["footer"]) == 3


def test_unfinished(made: MadeOutput):
    (made.path / schema.MANIFEST).unlink()
    (made.path / schema.marker_path(1)).unlink()
    with pytest.raises(OutputError, match="not complete"):
        verify_integrity(open_storage(str(made.path)))
    assert found(made, incomplete=True) == {}  # the shard without a marker may belong to a running attempt


def test_no_output(tmp_path: Path):
    with pytest.raises(OutputError, match=r"run\.json"):
        verify_integrity(open_storage(str(tmp_path)))


def test_reference_passes_and_needs_the_model(made: MadeOutput):
    report = verify_reference(str(made.path), samples=5)
    assert report.ok and report.counts["samples_compared"] == 5
    assert [line.split()[0] for line in report.table[1:]] == list(made.spec.columns)
    with pytest.raises(ConfigError, match="model_path"):
        verify_reference(str(made.path), model_path=str(made.path))


# ---- parts ----


def test_measure_counts_rows():
    values = np.array([[1, 2], [0, 0], [np.nan, 1], [np.inf, 1]], dtype=np.float32)
    stats = measure((values.view(np.uint32) >> 16).astype(np.uint16))
    assert stats == schema.ColumnStats(rows=4, sum_squares=5.0, absmax=2.0, nonfinite_rows=2, zero_rows=1)
    assert stats_differ(stats, dataclasses.replace(stats, sum_squares=5.00001)) is None
    assert "absmax" in str(stats_differ(stats, dataclasses.replace(stats, absmax=1.0)))


def test_repeats_of_one_token_are_right():
    bits = np.array([[1, 2, 3, 4, 5]] * 2 + [[1, 2, 3, 4, 6]], dtype=np.uint16)
    assert repeated_rows(bits, np.array([7, 7, 8])) is None
    assert repeated_rows(bits, np.array([7, 9, 8])) == (0, 1)


def test_shared_prefix():
    ids = [np.array(x, dtype=np.int32) for x in ([1, 2, 3], [9], [1, 2, 4, 5], [1])]
    assert shared_prefix(ids) == [2, 0, 2, 1]


def test_own_token_scores_tell_swapped_samples():
    random = np.random.default_rng(0)
    meaning, samples, length = random.normal(size=(50, 16)), 30, 40
    token = random.integers(0, 50, (samples, length))
    values = 0.7 * meaning[token] + random.normal(size=(samples, length, 16))
    values[[3, 8]] = values[[8, 3]]
    owner = np.repeat(np.arange(samples), length)
    z, size = own_token_scores(values.reshape(-1, 16).astype(np.float32), token.reshape(-1), owner, samples)
    right = np.delete(z, [3, 8])
    assert (size == length).all() and right.min() > 8 and max(z[3], z[8]) < 2


def test_job_exit_codes(made: MadeOutput, tmp_path: Path):
    def run(path: Path) -> subprocess.CompletedProcess[str]:
        job = Path(__file__).parents[2] / "jobs/verify.py"
        return subprocess.run(
            [sys.executable, str(job), f"output.path={path}"], capture_output=True, text=True, check=False
        )

    good = run(made.path)
    assert good.returncode == 0 and "integrity: ok" in good.stdout, good.stderr
    flip_a_state(made)
    bad = run(made.path)
    assert bad.returncode == 1 and "PROBLEM checksum" in bad.stdout
    none = run(tmp_path / "nothing")
    assert none.returncode == 2 and "Traceback" not in none.stderr


def test_argmax_is_a_figure(made: MadeOutput):
    report = verify_argmax(str(made.path), samples=99)
    assert report.ok and "t-1" in report.table[0] and "t+2" in report.table[0]
    assert report.counts["tokens_compared"] > 300


def test_argmax_finds_the_next_token_of_greedy_text(made: MadeOutput):
    """The text is changed so that each next token is the model's choice: what greedy answers are."""
    dataset = HiddenStatesDataset(str(made.path), columns=["final_pre_norm"])
    head = output_matrix(str(made.model), "tiny")

    def change(rows: Rows) -> Rows:
        for row, sample in zip(rows, dataset, strict=False):
            choice = (dataset.to_post_norm(sample["final_pre_norm"]) @ head.T).argmax(-1).numpy()
            row["input_ids"] = np.concatenate([row["input_ids"][:1], choice[:-1]]).astype(np.int32)
        return rows

    rewrite(made, 0, change)
    (made.path / schema.MANIFEST).unlink()
    for unit in (1, 2):
        (made.path / schema.marker_path(unit)).unlink()
    table = verify_argmax(str(made.path), samples=99, incomplete=True).table
    assert "t+1 100.0%" in table[0]


def test_argmax_needs_a_final_state(tmp_path: Path):
    made = make_output(tmp_path / "out", final="none")
    with pytest.raises(ConfigError, match="needs a final state"):
        verify_argmax(str(made.path))
