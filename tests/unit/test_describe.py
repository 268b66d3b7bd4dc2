"""hs_ray.describe: figures of a known output, for a terminal."""

import dataclasses
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
from damage import copied, edit_json
from make_output import PLAN_COLUMNS, H, MadeOutput, make_output, to_float

from hs_ray import schema
from hs_ray.describe import describe, layer_text, text
from hs_ray.errors import OutputError, ShardError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    return make_output(tmp_path_factory.mktemp("describe") / "out", compression="split_zstd")


def test_figures(made: MadeOutput):
    d = describe(str(made.path))
    tokens = [made.samples[i].num_tokens for i in made.committed]
    assert (d.samples, d.failed, d.tokens, d.complete, d.units) == (11, 1, sum(tokens), True, 3)
    assert d.raw_bytes == sum(tokens) * 4 * H * 2
    assert d.bytes == sum(made.shard(unit).stat().st_size for unit in range(3))
    assert d.lengths["max"] == 128 and d.lengths["min"] == 1
    assert sum(count for _, count in d.histogram) == 12 and (64, 5) in d.histogram  # 33 to 64 tokens
    assert d.rejects == {"not_json": 2, "engine_error": 1}
    norms = {n.column: n for n in d.norms}
    expected = np.linalg.norm(to_float(made.states[0]["hidden_4"]), axis=1)
    assert norms["hidden_4"].first == pytest.approx(expected[0], rel=1e-5)
    assert norms["hidden_4"].largest == pytest.approx(expected.max(), rel=1e-5)


def test_text_shows_both_spellings(made: MadeOutput):
    shown = text(describe(str(made.path)))
    assert "2 (output of layer 1), 4 (output of layer 3), 5 (output of layer 4)" in shown
    assert re.search(r"samples +11 with states, 1 failed", shown) and "not_json" in shown
    assert re.search(r"size +\d+\.\d kB in 3 shards \(split_zstd, 0\.\d+ of the states' \d+\.\d kB\)", shown)
    assert layer_text(schema.layer_spellings([0])[0]) == "0 (the embeddings)"


def test_unfinished_and_absent(tmp_path: Path):
    made = make_output(tmp_path / "out", complete=False)
    d = describe(str(made.path))
    assert not d.complete and "unfinished" in text(d)
    with pytest.raises(OutputError, match=r"run\.json"):
        describe(str(tmp_path / "nothing"))


@pytest.mark.parametrize("path", [schema.REJECTED, f"{schema.SAMPLES}/part-00000.parquet"])
def test_a_file_of_the_plan_that_cannot_be_read(made: MadeOutput, tmp_path: Path, path: str):
    damaged = copied(made, tmp_path / "out")
    (damaged.path / path).write_bytes((damaged.path / path).read_bytes()[:-50])
    with pytest.raises(ShardError, match=rf"{path}: cannot be read"):
        describe(str(damaged.path))
    pq.write_table(pa.table({"code": [1]}), damaged.path / path)
    if path != schema.REJECTED:
        with pytest.raises(ShardError, match="no file of a plan, it has no loss_mask, unit"):
            describe(str(damaged.path))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: run.update(versions=5), "versions"),
        (lambda run: run["spec"]["layers"][1].pop("output_of_layer") and None, "spec.layers"),
        (lambda run: run["spec"]["layers"][1].pop("column") and None, "spec.layers"),  # the page about the run shows it
        (lambda run: run["plan"].update(truncated="two"), "plan.truncated"),
    ],
)
def test_a_run_json_that_cannot_be_shown(made: MadeOutput, tmp_path: Path, change: Callable[[Any], Any], told: str):
    damaged = copied(made, tmp_path / "out")
    edit_json(damaged.path / schema.RUN_JSON, change)
    with pytest.raises(OutputError, match=rf"_run/run\.json is not .*, or damaged: no usable {told} in it"):
        describe(str(damaged.path))


def test_a_run_json_of_an_earlier_release(made: MadeOutput, tmp_path: Path):
    older = copied(made, tmp_path / "out")
    edit_json(older.path / schema.RUN_JSON, lambda run: run.pop("versions") and None)
    assert describe(str(older.path)).versions == {}


def test_the_ids_of_the_plan_are_not_read(made: MadeOutput, tmp_path: Path):
    """They are most of it, and a length is to be had for less."""
    blind = copied(made, tmp_path / "out")
    part = blind.path / schema.SAMPLES / "part-00000.parquet"
    metadata = pq.ParquetFile(part).metadata
    data = bytearray(part.read_bytes())
    for unit in range(metadata.num_row_groups):
        chunk = metadata.row_group(unit).column(PLAN_COLUMNS.names.index("input_ids"))
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    part.write_bytes(data)
    assert describe(str(blind.path)) == dataclasses.replace(describe(str(made.path)), path=str(blind.path))


def test_job(made: MadeOutput):
    job = [
        sys.executable,
        str(Path(__file__).parents[2] / "jobs/describe.py"),
        f"output.path={made.path}",
        "report=true",
    ]
    result = subprocess.run(job, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "11 with states" in result.stdout, result.stderr
    assert (made.path / "_run/report.html").read_text().startswith("<!doctype html>")
