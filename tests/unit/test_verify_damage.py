"""verify goes on where something cannot be read: each damage is a problem that names its file, none ends the audit."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import edit_json, flip_bit, found
from make_output import MadeOutput, make_output, read_marker, rewrite

from hs_ray import schema
from hs_ray.errors import OutputError
from hs_ray.plan import read_unit
from hs_ray.storage import open_storage
from hs_ray.verify import verify_integrity
from hs_ray.verify.run import read_run
from hs_ray.verify.shard import audit_shard

MARKER = schema.marker_path(1)
Rows = list[dict[str, Any]]


# ---- one flipped bit ----


def test_a_bit_of_the_footers_json(made: MadeOutput):
    """The other shards' results are still told: here, that one of them has another sign."""
    at = made.shard(0).read_bytes().rindex(b'{"byte_order"')
    flip_bit(made.shard(0), at, 3)

    def change(rows: Rows) -> Rows:
        rows[0]["hidden_2"][2, 2] ^= 0x8000
        return rows

    rewrite(made, 1, change)
    flip = {"checksum", "footer"}
    problems = found(made)
    assert problems.keys() == {*flip, "bits"}
    assert all(text.startswith("shards/unit-000000-0001-aaaa.parquet") for kind in flip for text in problems[kind])
    assert "entry is damaged (JSONDecodeError" in problems["footer"][0]
    assert "sample 'id-4'" in problems["bits"][0]


def test_no_bit_of_the_footer_ends_the_audit(tmp_path: Path):
    """A bit of every byte, the checksum of the file made to fit. In a process of its own: Arrow could abort."""
    made = make_output(tmp_path / "out", lengths=[3, 2], per_unit=2)
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_verify_damage as t; t.flip_each({str(made.path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 1000


def flip_each(path: str) -> None:
    """Audits the first shard with one flipped bit after the other in its footer; prints how many there were."""
    storage = open_storage(path)
    run = read_run(storage)
    marker = schema.Marker.from_json(storage.read_bytes(schema.marker_path(0)))
    planned = read_unit(storage, 0, run["plan"]["units_per_file"])
    good = storage.read_bytes(str(marker.shard))
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for at in range(footer, len(good)):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        storage.write(str(marker.shard), bytes(data))
        fitting = dataclasses.replace(marker, sha256=hashlib.sha256(data).hexdigest())
        audit_shard(storage, run, tuple(run["spec"]["columns"]), fitting, planned, norm=None)
    print(len(good) - footer)


def test_an_error_that_nobody_thought_of(made: MadeOutput, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> bool:
        raise OverflowError("odd")

    monkeypatch.setattr("hs_ray.verify.shard.footer_fits", broken)
    problems = found(made)
    assert problems.keys() == {"file"} and len(problems["file"]) == 3
    assert "unit-000002-0001-aaaa.parquet: damaged, the check ended at OverflowError: odd" in problems["file"][2]


def test_a_store_that_does_not_answer_is_no_damage(made: MadeOutput, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any) -> bool:
        raise OutputError("no answer from the store")

    monkeypatch.setattr("hs_ray.verify.shard._load", refused)
    with pytest.raises(OutputError, match="no answer"):
        found(made)


# ---- JSON of another shape ----


@pytest.mark.parametrize(
    "change",
    [
        {"checksums": None},
        {"checksums": {"id-4": None}},
        {"checksums": {"id-4": [1, 2, 3, "4"]}},
        {"samples": "3"},
        {"samples": True},
        {"shard": 7},
        {"columns": []},
        {"columns": {"hidden_2": {"absmax": None}}},
        {"failed": [{"sample_id": "id-6"}]},
        {"failed": [{"sample_id": 6, "source": "a", "line": 1, "code": "b", "message": "c"}]},
        {"more": 1},
    ],
)
def test_a_marker_of_another_shape(made: MadeOutput, change: dict[str, Any]):
    edit_json(made.path / MARKER, lambda marker: marker.update(change))
    assert found(made)["marker"][0].startswith(f"{MARKER}: cannot be read (not a marker of this format: ")


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", "\x00"])
def test_a_marker_that_is_none(made: MadeOutput, content: str):
    (made.path / MARKER).write_text(content)
    assert found(made)["marker"][0].startswith(f"{MARKER}: cannot be read")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: {"complete": True}, "counts is None, not a JSON dict"),
        (lambda m: m.update(shards=None), "shards is None, not a JSON list"),
        (lambda m: m.update(counts=[3]), "counts is [3], not a JSON dict"),
        (lambda m: m["shards"][1].pop("unit") and None, "1 of its shards have no unit"),
        (lambda m: m["shards"].append("more"), "1 of its shards have no unit"),
        (lambda m: [m], "not a JSON object"),
    ],
)
def test_a_manifest_of_another_shape(made: MadeOutput, change: Callable[[Any], Any], told: str):
    edit_json(made.path / schema.MANIFEST, change)
    assert told in found(made)["manifest"][0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: {"a": 1}, "fingerprint"),
        (lambda run: run["plan"].update(units="3"), "no usable plan.units in it"),
        (lambda run: run.pop("model") and None, "no usable model.name, model.vocab_size in it"),
        (lambda run: run["spec"].update(layers=[2, 4, 5]), "spec.layers"),
    ],
)
def test_a_run_of_another_shape_is_one_message(made: MadeOutput, change: Callable[[Any], Any], told: str):
    edit_json(made.path / schema.RUN_JSON, change)
    with pytest.raises(OutputError, match="is not one of hs_ray's, or damaged") as caught:
        verify_integrity(open_storage(str(made.path)))
    assert told in str(caught.value)


def test_a_plan_that_cannot_be_read(made: MadeOutput):
    part = made.path / schema.SAMPLES / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    assert len(found(made)["plan"]) == 2  # the file, and the number of samples


# ---- rows of another shape ----


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_a_null_in_a_list(made: MadeOutput, name: str):
    rewrite(made, 1, lambda rows: [rows[0] | {name: [*rows[0][name][:-1].tolist(), None]}, *rows[1:]])
    assert found(made)["row"] == [f"{read_marker(made, 1).shard}: row 0: a null in {name}"]


def test_a_row_without_tokens(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        columns = ("input_ids", "loss_mask", *made.spec.columns)
        return [rows[0] | {name: rows[0][name][:0] for name in columns} | {"num_tokens": 0}, *rows[1:]]

    rewrite(made, 1, change)
    told = "row 0, sample 'id-4': num_tokens is 0, 0 input_ids, 0 loss_mask"
    assert found(made)["row"] == [f"{read_marker(made, 1).shard}: {told}"]


def test_lists_that_are_too_short(made: MadeOutput):
    rewrite(made, 1, lambda rows: [rows[0] | {"loss_mask": rows[0]["loss_mask"][1:]}, *rows[1:]])
    length = made.samples[4].num_tokens
    assert f"num_tokens is {length}, {length} input_ids, {length - 1} loss_mask" in found(made)["row"][0]


# ---- the job ----


def test_the_job_tells_damage_in_its_report(made: MadeOutput):
    """With a reference, too: the audit is printed first, then one message about the file that cannot be read."""
    edit_json(made.path / MARKER, lambda marker: marker.update(samples=None))
    made.shard(2).write_bytes(made.shard(2).read_bytes()[:-50])
    job = [sys.executable, str(Path(__file__).parents[2] / "jobs/verify.py"), f"output.path={made.path}"]
    done = subprocess.run([*job, "verify.reference=hf"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"PROBLEM marker       {MARKER}: cannot be read" in done.stdout
    assert "PROBLEM file         shards/unit-000002-0001-aaaa.parquet: not a readable Parquet file" in done.stdout
    assert done.stderr.strip().count("\n") == 0 and str(made.path) in done.stderr


def test_a_run_that_is_no_json_is_one_message(made: MadeOutput):
    (made.path / schema.RUN_JSON).write_text(json.dumps({})[:1])
    job = [sys.executable, str(Path(__file__).parents[2] / "jobs/verify.py"), f"output.path={made.path}"]
    done = subprocess.run(job, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "run.json: damaged, not JSON" in done.stderr
