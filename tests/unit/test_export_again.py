"""hs_ray.export into a folder that is not new, and what else a person can get wrong: one message each."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import copied, edit_json
from make_output import (
    VOCAB,
    MadeOutput,
    fit_marker,
    make_output,
    read_marker,
    rewrite,
    sample_rows,
    write_manifest,
    write_norm,
    write_unit,
)

from hs_ray import export as exporting
from hs_ray import schema
from hs_ray.errors import ConfigError, OutputError, RunError
from hs_ray.export import EXPORTERS, NOTE, export
from hs_ray.export.common import TMP, vocab_mapping
from hs_ray.reader import Output, load_final_norm, open_output
from hs_ray.storage import Storage, open_storage
from hs_ray.weights import norm_digest

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    return make_output(tmp_path_factory.mktemp("export") / "out", final="both")


@pytest.fixture
def made(base: MadeOutput, tmp_path: Path) -> MadeOutput:
    return copied(base, tmp_path / "out")


def run(made: MadeOutput, to: str, target: Path, **options: Any) -> dict[str, Any]:
    return export(str(made.path), to, str(target), workers=1, log=lambda line: None, **options)


# ---- the output was extracted anew ----


def failed_sample_came_through(made: MadeOutput) -> None:
    """The same configuration, and so the same fingerprint and units; one sample more."""
    write_unit(made, 1, [row for i in range(4, 8) for row in sample_rows(made, i)], fit_checksums=True)
    fit_marker(made, dataclasses.replace(read_marker(made, 1), failed=[]))
    write_manifest(made)


def other_states(made: MadeOutput) -> None:
    rewrite(made, 1, lambda rows: [row | {"hidden_4": row["hidden_4"] ^ 1} for row in rows], fit_checksums=True)


def test_another_norm_is_another_export(tmp_path: Path):
    """Its files are norm(pre_norm): those that were made before the norm was mended would stay."""
    made = make_output(tmp_path / "out")
    right = load_final_norm(open_storage(str(made.path)))
    write_norm(made, right.weight * 2)
    note = run(made, "specforge", tmp_path / "x")
    assert note["final_norm"] == norm_digest(right.weight * 2, right.eps, right.kind)
    write_norm(made, right.weight)
    with pytest.raises(OutputError, match="made with another final norm; choose another folder, or remove this one"):
        run(made, "specforge", tmp_path / "x")
    edit_json(tmp_path / "x" / NOTE, lambda note: note.__delitem__("final_norm"))  # of an earlier release
    run(made, "specforge", tmp_path / "x")


@pytest.mark.parametrize("to", sorted(EXPORTERS))
@pytest.mark.parametrize("change", [failed_sample_came_through, other_states])
def test_another_extraction_is_another_export(
    made: MadeOutput, tmp_path: Path, to: str, change: Callable[[MadeOutput], None]
):
    run(made, to, tmp_path / "x")
    files = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    change(made)
    with pytest.raises(OutputError, match="another export .*choose another folder, or remove this one"):
        run(made, to, tmp_path / "x")
    assert {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()} == files
    shutil.rmtree(tmp_path / "x")
    run(made, to, tmp_path / "x")


def test_the_note_names_the_shards(made: MadeOutput, tmp_path: Path):
    note = run(made, "specforge", tmp_path / "x")
    assert json.loads((tmp_path / "x" / NOTE).read_text()) == note and note["complete"]
    markers = [read_marker(made, unit) for unit in range(3)]
    assert note["shards"] == [{"unit": m.unit, "samples": m.samples, "sha256": m.sha256} for m in markers]


def test_more_units_are_another_export(made: MadeOutput, tmp_path: Path):
    kept = (made.path / schema.marker_path(2)).read_text()
    (made.path / schema.marker_path(2)).unlink()
    (made.path / schema.MANIFEST).unlink()
    run(made, "speculators", tmp_path / "x", incomplete=True)
    (made.path / schema.marker_path(2)).write_text(kept)
    with pytest.raises(OutputError, match="was extracted anew or has grown"):
        run(made, "speculators", tmp_path / "x", incomplete=True)


def test_an_output_is_opened_once(made: MadeOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Opening takes a listing, or all markers: once for each shard would be quadratic."""
    opened: list[str] = []

    def counting(storage: Storage, *arguments: Any) -> Output:
        opened.append(storage.root)
        return open_output(storage, *arguments)

    for module in ("reader", "export"):
        monkeypatch.setattr(f"hs_ray.{module}.open_output", counting, raising=False)
    assert run(made, "specforge", tmp_path / "x")["complete"]
    assert opened == [str(made.path)]


def test_workers_export_what_was_opened(made: MadeOutput, tmp_path: Path):
    """A unit that is committed meanwhile would move all later shards up by one."""
    (made.path / schema.MANIFEST).unlink()
    marker = made.path / schema.marker_path(0)
    kept = marker.read_text()
    marker.unlink()

    def commit(line: str) -> None:  # the first line is said before a worker begins
        marker.write_text(kept)

    export(str(made.path), "specforge", str(tmp_path / "x"), workers=2, incomplete=True, log=commit)
    samples = [torch.load(path)["input_ids"].tolist() for path in (tmp_path / "x").rglob("*.ckpt")]
    expected = [made.samples[i].input_ids.tolist() for i in made.committed if made.unit_of[i] > 0]
    assert sorted(samples) == sorted(expected)


def test_the_markers_of_a_complete_run_are_not_read(made: MadeOutput, tmp_path: Path):
    """They have the checksums of every sample: half a kilobyte each, and on S3 a request a unit."""
    for marker in (made.path / schema.DONE).iterdir():
        marker.write_text("")
    assert run(made, "specforge", tmp_path / "x")["complete"]


def test_of_an_unfinished_run_only_a_few_markers_are_in_memory(
    made: MadeOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    complete = run(made, "specforge", tmp_path / "x")
    (made.path / schema.MANIFEST).unlink()
    monkeypatch.setattr("hs_ray.reader.output.MARKERS_AT_ONCE", 2)
    alive, most = weakref.WeakSet[schema.Marker](), 0
    parse = schema.Marker.from_json

    def from_json(data: bytes) -> schema.Marker:
        nonlocal most
        alive.add(marker := HashedMarker(**vars(parse(data))))
        most = max(most, len(alive))
        return marker

    monkeypatch.setattr(schema.Marker, "from_json", from_json)
    assert run(made, "specforge", tmp_path / "x", incomplete=True) == complete
    assert most <= 2


class HashedMarker(schema.Marker):
    __hash__ = object.__hash__  # a set takes it


class Killer:
    """Kills the worker that it is handed over to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGKILL,)


def test_a_worker_that_was_killed_is_one_message():
    with pytest.raises(RunError) as caught:
        list(exporting._results([Killer(), Killer()], 2))  # type: ignore[list-item]  # it kills whoever unpickles it
    assert str(caught.value) == (
        "export.workers = 2: a worker was killed, most likely for want of memory; fewer, and run the same command again"
    )


# ---- the folder ----


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_note(base: MadeOutput, tmp_path: Path, content: str):
    (tmp_path / NOTE).write_text(content)
    with pytest.raises(OutputError, match=rf"export\.path = .*{NOTE} (cannot be read|is no note of ours)"):
        run(base, "specforge", tmp_path)


def test_a_folder_that_an_earlier_release_began(base: MadeOutput, tmp_path: Path):
    run(base, "specforge", tmp_path / "x")
    edit_json(tmp_path / "x" / NOTE, lambda note: note.pop("shards") and None)
    with pytest.raises(OutputError) as caught:
        run(base, "specforge", tmp_path / "x")
    assert str(caught.value) == (
        f"export.path = {tmp_path / 'x'}: was begun by an earlier release, which did not note the shards that its "
        "files are made from; remove it and export again"
    )


def test_a_start_that_was_cut_off_is_gone_on_with(base: MadeOutput, tmp_path: Path):
    """Killed after the folder was made and before the note was moved into it."""
    (tmp_path / "x" / TMP).mkdir(parents=True)
    (tmp_path / "x" / TMP / f"7-{NOTE}").write_text("{")
    assert run(base, "specforge", tmp_path / "x")["complete"]
    assert not (tmp_path / "x" / TMP).exists()


def test_while_it_runs_the_note_says_incomplete(made: MadeOutput, tmp_path: Path):
    run(made, "specforge", tmp_path / "x", draft_vocab_size=20)
    shutil.rmtree(tmp_path / "x/data")
    made.shard(0).write_bytes(b"x" * made.shard(0).stat().st_size)
    with pytest.raises(Exception, match="unit-000000"):
        run(made, "specforge", tmp_path / "x", draft_vocab_size=20)
    note = json.loads((tmp_path / "x" / NOTE).read_text())
    assert not note["complete"] and note["draft_vocab_size"] == 20  # the mapping is still there


@pytest.mark.parametrize("below", ["", "shards/x", "_run/tmp/x", "mine"])
def test_not_inside_the_output(made: MadeOutput, below: str):
    before = sorted(made.path.rglob("*"))
    with pytest.raises(OutputError, match="is inside the output"):
        run(made, "specforge", made.path / below)
    assert sorted(made.path.rglob("*")) == before


def test_beside_the_output(made: MadeOutput):
    assert run(made, "specforge", made.path.parent / "out-spec")["complete"]


def test_a_disk_that_takes_nothing_is_one_message(made: MadeOutput, tmp_path: Path):
    (tmp_path / "x").mkdir()
    run(made, "specforge", tmp_path / "x")
    shutil.rmtree(tmp_path / "x/data")
    (tmp_path / "x/data").write_text("in the way")
    with pytest.raises(OutputError, match=r"export\.path = .* cannot be written \("):
        run(made, "specforge", tmp_path / "x")


# ---- the draft vocabulary ----


def mapping_of(to: str, folder: Path) -> tuple[list[int], list[bool] | None]:
    """d2t, and t2d where the trainer has it in a file."""
    if to == "modelopt":
        return torch.load(folder / "d2t.pt").tolist(), None
    if to == "specforge":
        both = torch.load(folder / "vocab_mapping/vocab_mapping.pt")
        return both["d2t"].tolist(), both["t2d"].tolist()
    return np.load(folder / "d2t.npy").tolist(), np.load(folder / "t2d.npy").tolist()


@pytest.mark.parametrize("to", sorted(EXPORTERS))
def test_each_trainer_gets_the_mapping_and_keeps_it(base: MadeOutput, tmp_path: Path, to: str):
    learnt = np.concatenate([s.input_ids[s.loss_mask == 1] for s in (base.samples[i] for i in base.committed)])
    d2t, t2d = vocab_mapping(np.bincount(learnt, minlength=VOCAB), 60)
    run(base, to, tmp_path)  # without: it can be added
    assert not [path for path in tmp_path.rglob("*") if "d2t" in path.name or "vocab" in path.name]
    assert run(base, to, tmp_path, draft_vocab_size=60)["draft_vocab_size"] == 60
    assert mapping_of(to, tmp_path) in ((d2t.tolist(), t2d.tolist()), (d2t.tolist(), None))
    for size in (None, 50):
        with pytest.raises(OutputError, match=r"another export \(with export\.draft_vocab_size=60\)"):
            run(base, to, tmp_path, draft_vocab_size=size)
    assert run(base, to, tmp_path, draft_vocab_size=60)["complete"]


def test_no_learnt_token_gives_no_draft_vocabulary(made: MadeOutput, tmp_path: Path):
    for unit in range(3):
        rewrite(made, unit, lambda rows: [row | {"loss_mask": row["loss_mask"] * 0} for row in rows])
    with pytest.raises(ConfigError, match=r"export\.draft_vocab_size = 20: .* no loss_mask has a 1"):
        run(made, "specforge", tmp_path / "x", draft_vocab_size=20)
    assert not (tmp_path / "x/vocab_mapping").exists()
    assert run(made, "specforge", tmp_path / "x")["complete"]  # the files are there, the mapping was all that lacked


# ---- names and damage ----


def test_ids_that_are_no_file_names(tmp_path: Path, base: MadeOutput):
    """Model-Optimizer's files are called after samples; a file system counts bytes."""
    exporter = EXPORTERS["modelopt"]
    for sample_id, plain in (
        ("a" * 200, True),
        ("a" * 201, False),
        ("a" + "样" * 66, True),
        ("a" + "样" * 67, False),
        ("../a", False),
    ):
        name = exporter.file_name(None, 0, 0, sample_id)  # type: ignore[arg-type]
        assert (sample_id in name) is plain
        (tmp_path / f"1234567-{Path(name).name}").write_text("")  # as it is called in the making


@pytest.mark.parametrize("job", ["export", "describe"])
@pytest.mark.parametrize("what", ["shard", "manifest", "run", "foreign run", "marker"])
def test_the_jobs_tell_damage_in_one_message(made: MadeOutput, tmp_path: Path, job: str, what: str):
    if what == "shard":
        made.shard(0).write_bytes(made.shard(0).read_bytes()[:-100])
    elif what == "manifest":
        edit_json(made.path / schema.MANIFEST, lambda manifest: {"complete": True})
    elif what == "run":
        (made.path / schema.RUN_JSON).write_text("{")
    elif what == "foreign run":
        edit_json(made.path / schema.RUN_JSON, lambda run: run.pop("plan") and None)
    else:
        edit_json(made.path / schema.marker_path(1), lambda marker: marker.update(checksums=None))
    script = str(Path(__file__).parents[2] / f"jobs/{job}.py")
    target = [f"export.path={tmp_path / 'x'}"] if job == "export" else []
    if job == "export" and what == "marker":  # it reads those of an unfinished run alone
        (made.path / schema.MANIFEST).unlink()
        target.append("export.incomplete=true")
    done = subprocess.run(
        [sys.executable, script, f"output.path={made.path}", *target], capture_output=True, text=True, check=False
    )
    assert done.returncode == (2 if what == "foreign run" else 1), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.strip().count("\n") == 0
    named = {"shard": "unit-000000", "manifest": "manifest.json", "marker": "unit-000001.json"}
    assert str(made.path) in done.stderr and named.get(what, "run.json") in done.stderr
