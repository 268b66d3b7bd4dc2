"""hs_ray.verify: every kind of damage is found, also where checksum, size and statistics were made to fit."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import edit_json, found
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
from hs_ray.errors import OutputError
from hs_ray.storage import open_storage
from hs_ray.verify import verify_integrity, verify_reference
from hs_ray.verify.rows import measure, repeated_rows, stats_differ

Rows = list[dict[str, Any]]


@pytest.mark.parametrize("compression", ["none", "split_zstd"])
def test_a_sound_output_passes(tmp_path: Path, compression: str):
    made = make_output(tmp_path / "out", layers=(0, 2, 8), final="both", compression=compression)
    report = verify_integrity(open_storage(str(made.path)))
    assert report.problems == []
    assert report.counts["samples"] == 11 and report.counts["failed"] == 1 and report.counts["rejected"] == 2
    assert report.counts["tokens"] == sum(made.samples[i].num_tokens for i in made.committed)
    assert report.counts["checksums"] == 11 * len(made.spec.columns)
    assert report.counts["norms"] == 11


def test_pieces_pass_and_a_lost_piece_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schema, "MAX_CELL_BYTES", 50 * H * 2)
    made = make_output(tmp_path / "out", lengths=[40, 101, 50, 7, 150, 3])
    assert found(made) == {}
    rewrite(made, 0, lambda rows: rows[:2] + rows[3:])
    assert "('id-1', 50)" in found(made)["coverage"][0]


# ---- the five kinds of damage: as they happen, with the marker made to fit, with the checksums made to fit, too ----


def flip_a_state(made: MadeOutput) -> None:
    column = pq.ParquetFile(made.shard(0)).metadata.row_group(0).column(8)
    flip_byte(made.shard(0), column.data_page_offset + column.total_compressed_size - 1001)  # a high byte


def flipped_byte(made: MadeOutput, rows: Rows) -> Rows:
    largest = int(np.argmax(rows[0]["hidden_2"][20] & 0x7FFF))
    rows[0]["hidden_2"][20, largest] ^= 0x8000  # its sign: no statistic sees it
    return rows


def missing_row(made: MadeOutput, rows: Rows) -> Rows:
    return rows[:2] + rows[3:]


def swapped_samples(made: MadeOutput, rows: Rows) -> Rows:
    a, b = sorted(rows[:2], key=lambda row: -row["num_tokens"])
    for name in made.spec.columns:
        length = len(b[name])
        a[name][:length], b[name][:] = b[name].copy(), a[name][:length].copy()
    return rows


def shifted_layer(made: MadeOutput, rows: Rows) -> Rows:
    number = {sample.sample_id: i for i, sample in enumerate(made.samples)}
    samples = [made.samples[number[row["sample_id"]]] for row in rows]
    states = true_states(made.model, samples, dataclasses.replace(made.spec, layers=(3,)))
    return [row | {"hidden_2": state["hidden_3"]} for row, state in zip(rows, states, strict=True)]


def zeroed_sample(made: MadeOutput, rows: Rows) -> Rows:
    return [rows[0] | {name: np.zeros_like(rows[0][name]) for name in made.spec.columns}, *rows[1:]]


Damage = Callable[[MadeOutput, Rows], Rows]
DAMAGES = [flipped_byte, missing_row, swapped_samples, shifted_layer, zeroed_sample]


def damage(made: MadeOutput, kind: Damage, **fit: bool) -> None:
    """To one shard; of a shifted layer, to all of them: nothing of the output is left to tell."""
    for unit in (0, 1, 2) if kind is shifted_layer else (1,):
        rewrite(made, unit, lambda rows: kind(made, rows), **fit)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage(made: MadeOutput, kind: Damage):
    """The marker is what it was."""
    marker = made.path / schema.marker_path(1)
    before = marker.read_text()
    rewrite(made, 1, lambda rows: kind(made, rows))
    marker.write_text(before)
    write_manifest(made)
    problems = found(made)
    assert "unit-000001" in problems["checksum"][0]
    assert problems.keys() & {"bits", "coverage"}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_that_fits_the_marker(made: MadeOutput, kind: Damage):
    """Size, sha256, counts and statistics fit; what the device computed does not."""
    damage(made, kind)
    problems = found(made)
    if kind is missing_row:
        assert "('id-7', 0)" in problems["coverage"][0]
        assert "10 committed + 1 failed" in problems["conservation"][0]
    else:
        expected = {
            flipped_byte: {("id-4", "hidden_2")},
            swapped_samples: {(name, column) for name in ("id-4", "id-5") for column in made.spec.columns},
            shifted_layer: {(made.samples[i].sample_id, "hidden_2") for i in made.committed},
            zeroed_sample: {("id-4", column) for column in made.spec.columns},
        }[kind]
        told = [re.search(r"sample '(.+)', column (.+): the bits are not", text) for text in problems["bits"]]
        assert {match.groups() for match in told if match} == expected and len(told) == len(expected)
        others = {"zeros", "columns", "prefix"} if kind is zeroed_sample else set()
        assert problems.keys() == {"bits"} | others


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_that_fits_every_checksum(made: MadeOutput, kind: Damage):
    """Only the values tell, against transformers; or the plan, where a row is missing."""
    damage(made, kind, fit_checksums=True)
    if kind is missing_row:
        assert "coverage" in found(made)
        return
    assert "bits" not in found(made)
    details = [problem.detail for problem in verify_reference(str(made.path), samples=99).problems]
    assert any("'id-4', column hidden_2" in text for text in details)
    if kind is swapped_samples:
        assert any("'id-5', column hidden_2" in text for text in details)


def test_flipped_byte_of_the_file(made: MadeOutput):
    flip_a_state(made)
    assert "unit-000000" in found(made)["checksum"][0]
    fit_marker(made, read_marker(made, 0))
    write_manifest(made)
    assert "sample 'id-0'" in found(made)["bits"][0]  # the marker has checksums of each sample's states


def test_flipped_byte_in_the_ids(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        rows[0]["input_ids"] = rows[0]["input_ids"].copy()
        rows[0]["input_ids"][3] ^= 1
        return rows

    rewrite(made, 0, change)
    assert "sample 'id-0': input_ids" in found(made)["plan"][0]


def test_a_marker_without_checksums(made: MadeOutput):
    marker = read_marker(made, 1)
    fit_marker(made, dataclasses.replace(marker, checksums={"id-4": marker.checksums["id-4"]}))
    text = found(made)["bits"]
    assert text == ["_run/done/unit-000001.json: 2 samples have no checksums of their 4 columns, the first is 'id-5'"]


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
    """One string is changed, and one is blamed."""
    run = made.path / schema.RUN_JSON
    run.write_text(run.read_text().replace("f" * 64, "e" * 64))
    told = f"is {'e' * 16}..., all 3 markers have {'f' * 16}...: of another run, or damaged"
    assert found(made) == {"fingerprint": [f"_run/run.json: {told}"]}


def test_a_marker_of_another_fingerprint(made: MadeOutput):
    edit_json(made.path / schema.marker_path(1), lambda marker: marker.update(fingerprint="e" * 64))
    assert found(made) == {"fingerprint": [f"{schema.marker_path(1)}: is {'e' * 16}..., the run's is {'f' * 16}..."]}


def test_unfinished(made: MadeOutput):
    (made.path / schema.MANIFEST).unlink()
    (made.path / schema.marker_path(1)).unlink()
    with pytest.raises(OutputError, match=r"not complete .* with verify\.incomplete=true$"):
        verify_integrity(open_storage(str(made.path)))
    assert found(made, incomplete=True) == {}  # the shard without a marker may belong to a running attempt


def test_no_output(tmp_path: Path):
    with pytest.raises(OutputError, match=r"run\.json"):
        verify_integrity(open_storage(str(tmp_path)))


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


def test_how_far_it_is_is_told(made: MadeOutput, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hs_ray.verify.report.SAY_S", -1.0)
    said: list[str] = []
    (made.path / schema.FINAL_NORM).unlink()
    verify_integrity(open_storage(str(made.path)), log=said.append)
    assert said == ["0/1 files of the plan, 1 problems so far"] + [f"{n}/3 shards, 1 problems so far" for n in range(3)]
