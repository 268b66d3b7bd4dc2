"""An output in the input's folder, or the other way round: told at the first start, before the second reads shards."""

from pathlib import Path

import pytest
from test_preflight import model_folder

from hs_ray.config import ExtractJob, InputConfig, OutputConfig
from hs_ray.errors import ConfigError
from hs_ray.inputs import overlaps
from hs_ray.pipeline.preflight import preflight

IN_THE_INPUT = [
    ("/d", "/d/hs"),
    ("/d/", "/d"),
    ("/d", "file:///d/hs"),
    ("/d/a/../", "/d/x/../hs/"),
    ("/d/**/*.jsonl", "/d/hs"),
    ("/d/**", "/d/hs"),
    ("/d/*/*/*.jsonl", "/d/hs"),
    ("/d/*/**/*.jsonl", "/d/hs"),
    ("/d/h*/**", "/d/hs/x"),
    ("/d/*/*.json", "/d/hs"),
    ("s3://b/*/*/*.jsonl", "s3://b/hs"),
    (".", "hs"),
    ("**/*.jsonl", "hs"),
    ("s3://b/d", "s3://b/d/hs"),
    ("s3://b/d/", "s3a://b/d"),
    ("s3://b", "s3://b/hs"),
]
IN_THE_OUTPUT = [
    ("/hs/in.jsonl", "/hs"),
    ("/hs/in/*.jsonl", "/hs/"),
    ("hs/in", "hs"),
    ("s3://b/hs/in.jsonl", "s3://b/hs"),
]
APART = [
    ("/d/in.jsonl", "/d/hs"),
    ("/d/*.jsonl", "/d/hs"),
    ("/d/*/train.jsonl", "/d/hs"),
    ("/d/*/*.jsonl", "/d/hs"),
    ("/d/[ab]/*/*.jsonl", "/d/hs"),
    ("/d/in", "/d/in-hs"),
    ("/d/hs", "/d/h"),
    ("s3://b/d/in.jsonl", "s3://b/d/hs"),
    ("s3://b/d", "s3://b/d2"),
    ("s3://d", "/d/hs"),
    ("/b/d", "s3://b/d/hs"),
]


def found(given: str | list[str] | None, **output: str) -> list[str]:
    return overlaps(InputConfig(path=given), OutputConfig(**output))


@pytest.mark.parametrize(("path", "output"), IN_THE_INPUT)
def test_an_output_in_the_input(path: str, output: str) -> None:
    assert found(path, path=output) == [
        f"output.path = {output}: it lies in input.path = {path}, and its files would be read as input; "
        "choose a folder outside of it"
    ]


@pytest.mark.parametrize(("path", "output"), IN_THE_OUTPUT)
def test_an_input_in_the_output(path: str, output: str) -> None:
    assert found(path, path=output) == [
        f"input.path = {path}: it lies in output.path = {output}, which is for what is written there; "
        "choose another folder for one of them"
    ]


@pytest.mark.parametrize(("path", "output"), APART)
def test_neighbours_are_none(path: str, output: str) -> None:
    assert found(path, path=output) == []


def test_each_of_several_inputs(tmp_path: Path) -> None:
    assert [text.split(":")[0] for text in found(["/a", "/d", "/d/hs/x.jsonl"], path="/d/hs")] == [
        "output.path = /d/hs",
        "input.path = /d/hs/x.jsonl",
    ]
    assert found(None, path="/d/hs") == []


def test_a_link_leads_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert found(str(tmp_path / "data"), path=str(tmp_path / "link/hs"))


def test_the_nodes_own_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are there; and other things may be, the input among them."""
    monkeypatch.setenv("DISK", "/nvme")
    [problem] = found("/nvme", path="/o", node_path="$DISK/hs")
    assert problem.startswith("output.node_path = $DISK/hs: it lies in input.path = /nvme")
    assert found("/nvme/in.jsonl", path="/o", node_path="/nvme") == []


def test_the_job_is_refused_with_all_else_that_is_wrong(tmp_path: Path) -> None:
    job = ExtractJob(max_seq_len=65, dry_run=True)
    job.model.path = model_folder(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"input_ids": [1, 2]}\n')
    job.input.path, job.output.path = str(tmp_path), str(tmp_path / "hs")
    with pytest.raises(ConfigError) as caught:
        preflight(job)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == ["max_seq_len", "output.path"]
