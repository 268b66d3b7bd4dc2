"""A reader on another node has the tokenizer that the driver has, or says that it has not."""

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Hub

from hs_ray.config import ExtractJob
from hs_ray.errors import ConfigError
from hs_ray.inputs import TokenizeSettings, list_sources, read, read_chunk, split_sources
from hs_ray.plan import resolve

CHAT = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n'


@pytest.fixture(autouse=True)
def another_process() -> Iterator[None]:
    read._encoders.clear()
    yield
    read._encoders.clear()


@pytest.fixture
def job(tmp_path: Path, tiny_random: Path) -> ExtractJob:
    made = ExtractJob(max_seq_len=64)
    (tmp_path / "in.jsonl").write_text(CHAT)
    made.input.path, made.output.path = str(tmp_path / "in.jsonl"), str(tmp_path / "out")
    made.model.path = str(shutil.copytree(tiny_random, tmp_path / "model"))
    return made


def ids(job: ExtractJob, settings: TokenizeSettings) -> list[list[int]]:
    found: list[list[int]] = []
    for chunk in split_sources(list_sources(job.input)):
        found += read_chunk(chunk, settings)["input_ids"].to_pylist()
    return found


def older(folder: Path) -> None:
    """As an update that has not reached this node."""
    template = folder / "chat_template.jinja"
    template.write_text("older: " + template.read_text())


def test_an_older_template_is_refused(job: ExtractJob) -> None:
    settings, folder = resolve(job).tokenize_settings, str(job.model.path)
    assert len(ids(job, settings)[0]) > 5
    read._encoders.clear()
    older(Path(folder))
    says = (
        f"^model.path = {folder}: the tokenizer in {folder} on node {socket.gethostname()} differs from the driver's; "
        "give that node the same files"
    )
    with pytest.raises(ConfigError, match=re.sub(r"([.(])", r"\\\1", says)):
        ids(job, settings)


def test_a_tokenizer_apart_from_the_model_is_named(job: ExtractJob, tmp_path: Path) -> None:
    job.model.tokenizer = str(shutil.copytree(str(job.model.path), tmp_path / "tokenizer"))
    settings = resolve(job).tokenize_settings
    older(Path(str(job.model.path)))
    assert ids(job, settings)
    read._encoders.clear()
    older(Path(job.model.tokenizer))
    with pytest.raises(ConfigError, match=r"^model\.tokenizer = .*/tokenizer: the tokenizer in .*/tokenizer on node "):
        ids(job, settings)


def test_it_is_looked_at_once_a_process_and_where_it_is_needed(
    job: ExtractJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = resolve(job).tokenize_settings
    looked: list[str] = []
    digest = read.tokenizer_files_digest
    monkeypatch.setattr(read, "tokenizer_files_digest", lambda info: looked.append(info.path) or digest(info))
    assert ids(job, settings) == ids(job, settings) and len(looked) == 1
    read._encoders.clear()
    Path(str(job.input.path)).write_text('{"input_ids": [1, 2]}\n')
    assert ids(job, settings) == [[1, 2]] and len(looked) == 1


def test_a_push_to_the_hub_does_not_reach_the_readers(
    job: ExtractJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a node fetched before: its reader looks for the driver's commit."""
    hub, folder = Hub(tmp_path / "hub", monkeypatch), Path(str(job.model.path))
    hub.push(folder, "1")
    job.model.path = hub.name
    settings = resolve(job).tokenize_settings
    before = ids(job, settings)
    read._encoders.clear()
    older(folder)
    hub.push(folder, "2")
    assert ids(job, settings) == before


def test_files_that_are_not_fetched_make_no_difference(
    job: ExtractJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's node may have the whole repository."""
    hub = Hub(tmp_path / "hub", monkeypatch)
    extra = hub.push(Path(str(job.model.path)), "1") / "tokenizer.model.v3"
    extra.write_bytes(b"for another library")
    job.model.path = hub.name
    settings = resolve(job).tokenize_settings
    extra.unlink()
    assert ids(job, settings)
