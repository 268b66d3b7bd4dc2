"""A complete small output for each test that damages one; made once, since its states are computed."""

import shutil
from pathlib import Path

import pytest
from damage import copied
from make_output import MadeOutput, make_output


@pytest.fixture(scope="session")
def sound_output(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    return make_output(tmp_path_factory.mktemp("sound") / "out")


@pytest.fixture
def made(sound_output: MadeOutput, tmp_path: Path) -> MadeOutput:
    return copied(sound_output, tmp_path / "out")


@pytest.fixture(scope="session")
def both_output(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    """With both final states; for tests that read."""
    return make_output(tmp_path_factory.mktemp("both") / "out", final="both")


@pytest.fixture
def copy(both_output: MadeOutput, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(both_output.path, tmp_path / "out"))
