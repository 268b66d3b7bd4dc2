"""huggingface_hub's cache as downloads leave it, with no network: a push is another commit that `main` points to."""

import shutil
from pathlib import Path

import pytest


class Hub:
    """One repository, `org/tiny`."""

    name = "org/tiny"

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch):
        self._repo = cache / "models--org--tiny"
        (self._repo / "refs").mkdir(parents=True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def push(self, folder: Path, digit: str) -> Path:
        """A commit of 40 such digits with the files of `folder`; returns its snapshot."""
        commit = digit * 40
        snapshot = Path(shutil.copytree(folder, self._repo / "snapshots" / commit))
        (self._repo / "refs" / "main").write_text(commit)
        return snapshot
