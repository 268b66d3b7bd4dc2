"""A complete small output for each test that damages one; made once, since its states are computed."""

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
