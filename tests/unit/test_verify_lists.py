"""verify: markers, manifest, plan, `_rejects/` and the folder of shards say the same, sample by sample."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import edit_json, found
from make_output import REJECT_COLUMNS, MadeOutput, metadata, read_marker, rewrite, write_manifest

from hs_ray import schema
from hs_ray.schema import Reject

REJECTS_FILE = "_rejects/rejects.jsonl"


def failed(made: MadeOutput, *numbers: int) -> list[Reject]:
    return [Reject(made.samples[i].sample_id, "train.jsonl", made.samples[i].line, "engine_error", "") for i in numbers]


def lose_unit(made: MadeOutput, unit: int, rejects: list[Reject]) -> None:
    """The unit has no shard, its marker names `rejects`; the manifest and `_rejects/` are made to fit."""
    empty = {"shard": None, "bytes": 0, "sha256": "", "samples": 0, "rows": 0, "tokens": 0}
    marker = dataclasses.replace(read_marker(made, unit), columns={}, checksums={}, failed=rejects, **empty)
    made.shard(unit).unlink(missing_ok=True)
    (made.path / schema.marker_path(unit)).write_text(marker.to_json())
    write_manifest(made)


# ---- the manifest ----


def test_a_shard_that_the_manifest_names_twice(made: MadeOutput):
    edit_json(made.path / schema.MANIFEST, lambda manifest: manifest["shards"].append(manifest["shards"][1]))
    assert found(made) == {"manifest": ["manifest.json: unit-000001 is listed 2 times"]}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("fingerprint", "0" * 64, "fingerprint is"),
        ("format_version", 2, "format_version is 2, the run's is 1"),
        ("num_hidden_layers", 9, "num_hidden_layers is 9, the run's is 8"),
        ("hidden_size", 32, "hidden_size is 32, the run's is 64"),
        ("layers", schema.layer_spellings([2, 4, 6]), "layers is"),
        ("final", "none", "final is 'none', the run's is 'pre_norm'"),
        ("model", "other", "model is 'other', the run's is 'tiny'"),
        ("revision", "main", "revision is 'main', the run's is None"),
    ],
)
def test_what_the_manifest_says_of_the_run(made: MadeOutput, name: str, value: Any, told: str):
    edit_json(made.path / schema.MANIFEST, lambda manifest: manifest.update({name: value}))
    problems = found(made)
    assert problems.keys() == {"manifest"} and told in problems["manifest"][0]


@pytest.mark.parametrize("change", [{"units": 4}, {"units": 2}, {"rejects_by_code": {}}, {"rejects_by_code": None}])
def test_counts_of_the_manifest(made: MadeOutput, change: dict[str, Any]):
    edit_json(made.path / schema.MANIFEST, lambda manifest: manifest["counts"].update(change))
    problems = found(made)
    if change == {"rejects_by_code": None}:
        assert problems == {}  # as good as absent
    else:
        assert problems.keys() == {"conservation"} and f"{next(iter(change))} is" in problems["conservation"][0]


def test_what_the_manifest_need_not_say(made: MadeOutput):
    """The contract names complete, counts and shards; who failed may be in rejects_by_code or not."""

    def change(manifest: dict[str, Any]) -> dict[str, Any]:
        del manifest["counts"]["rejects_by_code"]
        return {name: manifest[name] for name in ("complete", "counts", "shards")}

    edit_json(made.path / schema.MANIFEST, change)
    assert found(made) == {}
    for codes in ({"not_json": 2}, {"not_json": 2, "engine_error": 1}, {"not_json": 2, "too_long": 0}):
        edit_json(made.path / schema.MANIFEST, lambda m, codes=codes: m["counts"].update(rejects_by_code=codes))
        assert found(made) == {}


# ---- units ----


def test_a_unit_whose_samples_all_failed_passes(made: MadeOutput):
    lose_unit(made, 2, failed(made, 8, 9, 10, 11))
    assert found(made) == {}


def test_a_lost_unit_that_names_the_samples_of_another(made: MadeOutput):
    lose_unit(made, 1, failed(made, 0, 1, 2, 3))
    told = found(made)["conservation"]
    for i in range(4):
        line = made.samples[i].line
        text = f"failed sample 'id-{i}' (train.jsonl line {line}) is not in the plan of unit-000001"
        assert f"{schema.marker_path(1)}: {text}" in told


def test_a_lost_unit_that_names_too_few(made: MadeOutput):
    lose_unit(made, 1, failed(made, 4, 5))
    told = found(made)["conservation"]
    assert "_run/done/unit-000001.json: unit-000001: 4 samples planned, but 0 committed + 2 failed" in told


def test_a_failed_sample_that_is_named_twice(made: MadeOutput):
    lose_unit(made, 1, failed(made, 4, 5, 6, 6))
    assert any("sample 'id-6' is named as failed more than once" in text for text in found(made)["conservation"])


def test_a_unit_that_the_plan_has_not(made: MadeOutput):
    extra = schema.shard_path(99, "0001-aaaa")
    shutil.copy(made.shard(0), made.path / extra)
    marker = dataclasses.replace(read_marker(made, 0), unit=99, shard=extra, samples=0, rows=0, tokens=0)
    (made.path / schema.marker_path(99)).write_text(marker.to_json())
    entry = {"unit": 99, "path": extra, "samples": 0, "rows": 0, "tokens": 0, "bytes": 0, "sha256": marker.sha256}
    edit_json(made.path / schema.MANIFEST, lambda manifest: manifest["shards"].append(entry))
    problems = found(made)
    assert problems["marker"] == ["_run/done/unit-000099.json: the plan has no such unit, it has 3"]
    assert problems["foreign"] == [f"{extra}: no marker names this file"]
    assert problems["manifest"] == ["manifest.json: unit-000099 is in the manifest alone"]


def test_a_marker_that_names_the_shard_of_another_unit(made: MadeOutput):
    marker = made.path / schema.marker_path(1)
    edit_json(marker, lambda content: content.update(shard=schema.shard_path(0, "0001-aaaa")))
    write_manifest(made)
    assert any("which is no shard of unit-000001" in text for text in found(made)["marker"])


def test_folders_and_links_among_the_shards(made: MadeOutput, tmp_path: Path):
    """Also those whose content no walk from here would see."""
    (made.path / "shards/more/still").mkdir(parents=True)
    shutil.copy(made.shard(0), made.path / "shards/more/still")
    (tmp_path / "elsewhere").mkdir()
    (made.path / "shards/link").symlink_to(tmp_path / "elsewhere")
    (made.path / "shards/nowhere").symlink_to(tmp_path / "nothing")
    told = found(made)
    assert told.keys() == {"foreign"}
    assert [text.partition(":")[0] for text in told["foreign"]] == ["shards/link", "shards/more", "shards/nowhere"]


# ---- what readers refuse ----


@pytest.mark.parametrize("name", ["samples", "tokens", "bytes"])
def test_numbers_that_are_no_whole_ones(made: MadeOutput, name: str):
    edit_json(made.path / schema.MANIFEST, lambda m: m["shards"][0].update({name: float(m["shards"][0][name])}))
    edit_json(made.path / schema.MANIFEST, lambda m: m["counts"].update({name: float(m["counts"][name])}))
    problems = found(made)
    assert problems.keys() == {"manifest", "conservation"}


def test_what_only_the_reader_refuses(made: MadeOutput):
    edit_json(made.path / schema.MANIFEST, lambda manifest: manifest["counts"].pop("units") and None)
    assert "counts.units and counts.committed must be whole numbers" in found(made)["reader"][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unit", 2),
        ("attempt", "0001-bbbb"),
        ("dtype", "float16"),
        ("byte_order", "big"),
        ("format_version", 2),
        ("hidden_size", 64.0),
        ("model", None),
        ("revision", "main"),
        ("versions", {"sglang": "0.5.17"}),
    ],
)
def test_what_a_shard_says_of_itself(made: MadeOutput, monkeypatch: pytest.MonkeyPatch, name: str, value: Any):
    right = metadata(made)
    monkeypatch.setattr("make_output.metadata", lambda made: right | {name: value})
    rewrite(made, 1, lambda rows: rows)
    problems = found(made)
    assert problems.keys() == {"footer"} and f"{name}" in problems["footer"][0]


def test_a_hub_model_under_its_other_name(made: MadeOutput, monkeypatch: pytest.MonkeyPatch):
    """Renamed, or in other capitals: the commit is what counts, for a resume too."""
    commit = "1" * 40
    edit_json(made.path / schema.RUN_JSON, lambda run: run["model"].update(revision=commit))
    right = metadata(made)
    for unit, name in enumerate(("tiny", "meta/Tiny", "meta-llama/tiny")):
        monkeypatch.setattr("make_output.metadata", lambda made, name=name: right | {"revision": commit, "model": name})
        rewrite(made, unit, lambda rows: rows)
    edit_json(made.path / schema.MANIFEST, lambda manifest: manifest.update(revision=commit))
    assert found(made) == {}


# ---- lines without states ----


def edit_rejects(made: MadeOutput, change: Callable[[list[dict[str, Any]]], list[Any]]) -> None:
    path = made.path / REJECTS_FILE
    entries = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_a_failed_sample_that_is_not_listed_and_a_line_that_is_made_up(made: MadeOutput):
    edit_rejects(made, lambda entries: [*entries[:2], entries[2] | {"sample_id": "nobody", "line": 555}])
    told = "\n".join(found(made)["conservation"])
    assert "1 lines without states are not listed, the first is {'sample_id': 'id-6'" in told
    assert "1 entries are of no line that was rejected or failed, the first is {'sample_id': 'nobody'" in told


def test_another_code(made: MadeOutput):
    edit_rejects(made, lambda entries: [entries[0] | {"code": "too_long"}, *entries[1:]])
    assert len(found(made)["conservation"]) == 2


@pytest.mark.parametrize("entry", [[], None, {"line": 100}, {"source": "train.jsonl", "line": "100", "code": "x"}])
def test_a_line_of_rejects_that_is_none(made: MadeOutput, entry: Any):
    edit_rejects(made, lambda entries: [entry, *entries[1:]])
    assert found(made)["conservation"][0].startswith(f"{REJECTS_FILE}: line 0 cannot be read")


def write_rejected(made: MadeOutput, lines: list[int]) -> None:
    rows = [{"source": "train.jsonl", "line": n, "code": "not_json", "message": "..."} for n in lines]
    pq.write_table(pa.Table.from_pylist(rows, schema=REJECT_COLUMNS), made.path / schema.REJECTED)


def test_the_plans_rejects(made: MadeOutput):
    write_rejected(made, [100])
    assert found(made)["plan"] == [f"{schema.REJECTED}: holds 1 rejected lines, _run/run.json says 2"]
    write_rejected(made, [100, 102])
    assert "'line': 102" in "\n".join(found(made)["conservation"])
    path = made.path / schema.REJECTED
    path.write_bytes(path.read_bytes()[:-9])
    assert "2 lines of the input are in it alone" in found(made)["plan"][0]


def test_without_the_plans_rejects_the_lists_are_still_checked(made: MadeOutput):
    """What the markers, run.json and `_rejects/` say is compared in any case."""
    (made.path / schema.REJECTED).unlink()
    lost = f"{schema.REJECTED}: missing; the 2 lines that _run/run.json says were rejected are in it alone"
    assert found(made) == {"plan": [lost]}
    edit_rejects(made, lambda entries: [*entries[:2], entries[2] | {"line": 555}])
    assert "1 lines without states are not listed, the first is {'sample_id': 'id-6'" in "\n".join(
        found(made)["conservation"]
    )
    edit_rejects(made, lambda entries: [entries[0] | {"code": "too_long"}, *entries[1:]])
    assert "_rejects gives {'too_long': 1" in "\n".join(found(made)["conservation"])


def test_where_nothing_was_rejected_no_rejects_are_missed(made: MadeOutput):
    (made.path / schema.REJECTED).unlink()
    edit_rejects(made, lambda entries: entries[2:])
    edit_json(made.path / schema.RUN_JSON, lambda run: run["plan"].update(rejected=0, lines=13, rejects_by_code={}))
    edit_json(made.path / schema.MANIFEST, lambda m: m["counts"].update(rejected=0, lines=13, rejects_by_code={}))
    assert found(made) == {}


def test_codes_of_run_json(made: MadeOutput):
    edit_json(made.path / schema.RUN_JSON, lambda run: run["plan"].update(rejects_by_code={"not_json": 1}))
    told = f"plan.rejects_by_code is {{'not_json': 1}}, {schema.REJECTED} gives {{'not_json': 2}}"
    assert found(made) == {"conservation": [f"_run/run.json: {told}"]}
