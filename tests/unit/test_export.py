"""hs_ray.export: the files of each trainer, by the trainers' own rules (their readers run in tests/trainers)."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_output import VOCAB, MadeOutput, make_output, rewrite
from safetensors.torch import load_file

from hs_ray import schema
from hs_ray.errors import ConfigError, OutputError, ShardError
from hs_ray.export import NOTE, export
from hs_ray.export.common import vocab_mapping


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    return make_output(tmp_path_factory.mktemp("export") / "out", final="both")


@pytest.fixture
def made(base: MadeOutput, tmp_path: Path) -> MadeOutput:
    """A copy that a test may damage."""
    return dataclasses.replace(base, path=Path(shutil.copytree(base.path, tmp_path / "out")))


def run(made: MadeOutput, to: str, target: Path, **options: Any) -> list[str]:
    """Export in this process; what it said."""
    said: list[str] = []
    export(str(made.path), to, str(target), workers=1, log=said.append, **options)
    return said


def truth(made: MadeOutput, index: int, name: str) -> torch.Tensor:
    return torch.from_numpy(made.states[index][name]).view(torch.bfloat16)


def aux(made: MadeOutput, index: int) -> list[torch.Tensor]:
    return [truth(made, index, name) for name in ("hidden_2", "hidden_4", "hidden_5")]


def ids(made: MadeOutput, index: int) -> torch.Tensor:
    return torch.from_numpy(made.samples[index].input_ids).long()


def test_speculators(base: MadeOutput, tmp_path: Path):
    said = run(base, "speculators", tmp_path / "x", draft_vocab_size=100)
    assert any("--target-layer-ids 2 4 5" in line for line in said)
    import datasets

    table = datasets.load_from_disk(str(tmp_path / "x"))
    assert len(table) == len(base.committed) and table.column_names == ["input_ids", "loss_mask", "seq_len"]
    assert len(list((tmp_path / "x/hidden_states").iterdir())) == len(base.committed)
    for row, index in enumerate(base.committed):
        tensors = load_file(tmp_path / f"x/hidden_states/hs_{row}.safetensors")
        assert torch.equal(tensors["token_ids"], ids(base, index)) and tensors["token_ids"].dtype == torch.int64
        assert torch.equal(
            tensors["hidden_states"], torch.stack([*aux(base, index), truth(base, index, "final_pre_norm")], 1)
        )
        assert torch.equal(table[row]["input_ids"], ids(base, index))  # in torch format already
        assert table[row]["loss_mask"].tolist() == base.samples[index].loss_mask.tolist()
        assert int(table[row]["seq_len"]) == base.samples[index].num_tokens
    d2t, t2d = np.load(tmp_path / "x/d2t.npy"), np.load(tmp_path / "x/t2d.npy")
    assert d2t.dtype == np.int64 and t2d.dtype == bool and len(t2d) == VOCAB
    assert np.array_equal(np.flatnonzero(t2d), np.arange(100) + d2t)
    frequencies = torch.load(tmp_path / "x/token_freq.pt")
    assert sum(frequencies.values()) == sum(int(base.samples[i].loss_mask.sum()) for i in base.committed)
    assert not list((tmp_path / "x").glob("**/*.lock")) and not (tmp_path / "x/.hs_ray_tmp").exists()


def test_a_sample_that_was_tried_again_is_itself_wherever_its_row_is(made: MadeOutput, tmp_path: Path):
    """It is written last in its unit: row, file and states of it must still be those of one sample."""
    rewrite(made, 0, lambda rows: [*rows[1:], rows[0]])
    run(made, "speculators", tmp_path / "x")
    import datasets

    table = datasets.load_from_disk(str(tmp_path / "x"))
    for row, index in enumerate([1, 2, 3, 0, *made.committed[4:]]):
        tensors = load_file(tmp_path / f"x/hidden_states/hs_{row}.safetensors")
        assert torch.equal(tensors["token_ids"], ids(made, index)) and torch.equal(
            table[row]["input_ids"], ids(made, index)
        )
        assert torch.equal(tensors["hidden_states"][:, 0], aux(made, index)[0])


def test_specforge(base: MadeOutput, tmp_path: Path):
    run(base, "specforge", tmp_path / "x", draft_vocab_size=100)
    files = sorted((tmp_path / "x").rglob("*.ckpt"))
    assert len(files) == len(base.committed)
    for file, index in zip(files, base.committed, strict=True):
        record = torch.load(file, mmap=True, weights_only=True)
        assert record.keys() == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert record["input_ids"].dtype == record["loss_mask"].dtype == torch.int64
        assert torch.equal(record["input_ids"], ids(base, index))
        assert torch.equal(record["aux_hidden_state"], torch.cat(aux(base, index), -1)[None])
        assert torch.equal(record["hidden_state"], truth(base, index, "final_post_norm")[None])
    mapping = torch.load(tmp_path / "x/vocab_mapping/vocab_mapping.pt")
    assert mapping["d2t"].shape == (100,) and mapping["t2d"].sum() == 100
    note = json.loads((tmp_path / "x" / NOTE).read_text())
    assert note["complete"] and note["specforge"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_modelopt_makes_post_norm_states(tmp_path: Path):
    made = make_output(tmp_path / "out", final="pre_norm")
    both = make_output(tmp_path / "both", final="both")
    run(made, "modelopt", tmp_path / "x", draft_vocab_size=50)
    assert len(list((tmp_path / "x/data").rglob("*.pt"))) == len(made.committed)
    for index in made.committed:
        sample_id = made.samples[index].sample_id
        record = torch.load(next((tmp_path / "x/data").rglob(f"{sample_id}.pt")), weights_only=True)
        assert record["conversation_id"] == sample_id and "hidden_states_prenorm" not in record
        assert torch.equal(record["hidden_states"], truth(both, index, "final_post_norm"))
        assert torch.equal(record["aux_hidden_states"], torch.cat(aux(made, index), -1))
        assert record["loss_mask"].tolist() == made.samples[index].loss_mask.tolist()
    assert torch.load(tmp_path / "x/d2t.pt", weights_only=True).shape == (50,)


def test_speculators_v1(base: MadeOutput, tmp_path: Path):
    run(base, "speculators_v1", tmp_path / "x")
    lengths = json.loads((tmp_path / "x/sample_lengths.json").read_text())
    for row, index in enumerate(base.committed):
        record = torch.load(tmp_path / f"x/data_{row}.pt", weights_only=True)
        states = [*aux(base, index), truth(base, index, "final_pre_norm")]
        assert all(torch.equal(a, b) for a, b in zip(record["hidden_states"], states, strict=True))
        assert lengths[str(row)] == base.samples[index].num_tokens
    assert json.loads((tmp_path / "x/data_config.json").read_text())["layer_ids"] == [1, 3, 4, 7]


def test_layer_n_is_the_final_state(tmp_path: Path):
    made = make_output(tmp_path / "out", layers=(2, 4, 5, 8), final="none")
    run(made, "speculators", tmp_path / "x")
    states = load_file(tmp_path / "x/hidden_states/hs_0.safetensors")["hidden_states"]
    assert torch.equal(states[:, 3], truth(made, 0, "hidden_8")) and states.shape[1] == 4


def test_what_a_trainer_cannot_use_is_refused(tmp_path: Path):
    made = make_output(tmp_path / "out", layers=(0, 4), final="post_norm")
    for to, message in (
        ("speculators", "before the norm"),
        ("specforge", "exactly three auxiliary layers"),
        ("modelopt", "layer id 0, the embeddings"),
    ):
        with pytest.raises(ConfigError, match=rf"export\.to = {to}: .*{message}"):
            run(made, to, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_resume_writes_what_is_missing(base: MadeOutput, tmp_path: Path):
    target = tmp_path / "x"
    run(base, "speculators", target)
    files = sorted((target / "hidden_states").iterdir())
    before = {file.name: file.stat().st_mtime_ns for file in files}
    files[3].unlink()
    said = run(base, "speculators", target)
    assert any("1 samples written" in line for line in said)
    after = {file.name: file.stat().st_mtime_ns for file in (target / "hidden_states").iterdir()}
    assert after.keys() == before.keys() and [name for name in after if after[name] != before[name]] == [files[3].name]


def test_other_folders_are_left_alone(base: MadeOutput, tmp_path: Path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/mine").write_text("")
    with pytest.raises(OutputError, match="not empty"):
        run(base, "speculators", tmp_path / "x")
    run(base, "specforge", tmp_path / "y")
    with pytest.raises(OutputError, match="another export"):
        run(base, "modelopt", tmp_path / "y")


@pytest.mark.parametrize("what", ["nan", "zero"])
def test_states_that_no_trainer_checks(made: MadeOutput, tmp_path: Path, what: str):
    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[0]["hidden_4"][3] = 0x7FC0 if what == "nan" else 0
        return rows

    rewrite(made, 1, change)
    with pytest.raises(ShardError, match=r"sample 'id-4', column hidden_4: .*(NaN|zero)"):
        run(made, "specforge", tmp_path / "x")
    assert not [file for file in (tmp_path / "x").rglob("*.ckpt") if "000000004" in file.name]


def test_token_ids_past_the_vocabulary(made: MadeOutput, tmp_path: Path):
    run_json = made.path / schema.RUN_JSON
    run_json.write_text(run_json.read_text().replace(f'"vocab_size": {VOCAB}', '"vocab_size": 100'))
    with pytest.raises(ShardError, match=r"token ids .* the model has 0\.\.99"):
        run(made, "specforge", tmp_path / "x")


def test_unfinished_output_needs_the_flag(made: MadeOutput, tmp_path: Path):
    (made.path / schema.MANIFEST).unlink()
    (made.path / schema.marker_path(2)).unlink()
    with pytest.raises(OutputError, match=r"not complete .* with export\.incomplete=true$"):
        run(made, "specforge", tmp_path / "x")
    run(made, "specforge", tmp_path / "x", incomplete=True)
    assert len(list((tmp_path / "x").rglob("*.ckpt"))) == 7


def test_vocab_mapping():
    d2t, t2d = vocab_mapping(np.array([5, 0, 9, 9, 1]), 3)
    assert d2t.tolist() == [0, 1, 1] and t2d.tolist() == [True, False, True, True, False]


def test_job_in_processes(made: MadeOutput, tmp_path: Path):
    job = [
        sys.executable,
        str(Path(__file__).parents[2] / "jobs/export.py"),
        f"output.path={made.path}",
        "export.to=specforge",
    ]
    bad = subprocess.run(job, capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and "export.path = null" in bad.stderr
    good = subprocess.run([*job, f"export.path={tmp_path / 'x'}"], capture_output=True, text=True, check=False)
    assert good.returncode == 0 and "11 samples" in good.stdout, good.stderr
    assert len(list((tmp_path / "x").rglob("*.ckpt"))) == 11
