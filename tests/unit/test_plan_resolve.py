"""Job and model against each other, and the fingerprint."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from plans import MODEL, job, tokens, write

from hs_ray.config import Compression, ExtractJob, OnTooLong
from hs_ray.errors import ConfigError
from hs_ray.inputs import list_sources
from hs_ray.model import ModelInfo
from hs_ray.plan import (
    differing_keys,
    fingerprint,
    resolve,
)
from hs_ray.schema import CaptureSpec


@pytest.fixture
def real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelInfo:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    model = dataclasses.replace(MODEL, path=str(folder), tokenizer_path=str(folder))
    monkeypatch.setattr("hs_ray.plan.resolved.resolve_model", lambda config, weights: model)
    return model


def test_resolve_reports_all_problems_at_once(tmp_path: Path, real_model: ModelInfo) -> None:
    wrong = ExtractJob(layers=[3, 99], max_seq_len=65)
    wrong.model.chat_template = "/none.jinja"
    with pytest.raises(ConfigError) as caught:
        resolve(wrong)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == [
        "layers",
        "max_seq_len",
        "model.chat_template",
    ]
    assert resolve(ExtractJob(layers=[3, 2], max_seq_len=64)).spec == CaptureSpec((2, 3), "pre_norm", 12, 8)


CHANGES: list[tuple[str, Any]] = [
    ("layers", [2, 3]),
    ("max_seq_len", 63),
    ("on_too_long", OnTooLong.reject),
    ("limit", 5),
    ("id_key", "uuid"),
    ("allow_empty_mask", True),
    ("compression", Compression.split_zstd),
]


def test_the_fingerprint_names_the_keys_that_differ(tmp_path: Path, real_model: ModelInfo) -> None:
    write(tmp_path, [tokens("a", 3)])

    def made(
        sglang: str = "0.5.23", capture: str = "native", args: dict[str, Any] | None = None, **changes: Any
    ) -> tuple[str, dict[str, str]]:
        changed = job(tmp_path, **({"layers": [2]} | changes)).job
        changed.engine.args = args or {}
        resolved = resolve(changed)
        versions = {"sglang": sglang, "patch": "p", "capture": capture, "torch": "t"}
        return fingerprint(resolved, list_sources(changed.input), versions)

    first, parts = made()
    assert len(first) == 64 and made() == (first, parts)
    for key, value in CHANGES:
        other, changed = made(**{key: value})
        [difference] = differing_keys(parts, changed)
        assert other != first and difference.split(" = ")[0].endswith(key) and "(was " in difference
    assert "sglang = 0.5.24 (was 0.5.23)" in differing_keys(parts, made("0.5.24")[1])
    assert differing_keys(parts, made(capture="hook")[1]) == ["engine/models = hook (was native)"]
    assert made(args={"log_level": "info"})[0] == first != made(args={"quantization": "fp8"})[0]
    assert made(max_rejected=0.5, shard_bytes="1GiB", path=str(tmp_path / "in" / "a.jsonl"))[0] == first
    write(tmp_path, [tokens("a", 4)])
    assert [d.split(" = ")[0] for d in differing_keys(parts, made()[1])] == ["input.path"]
