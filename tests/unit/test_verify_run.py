"""run.json against itself: the parts of its fingerprint, the spec, the model, the configuration."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import copied, edit_json, found
from make_output import MadeOutput, make_output, metadata

from hs_ray import schema
from hs_ray.model import model_digest

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def whole_output(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    """One whose run.json says all that a real one does."""
    path = tmp_path_factory.mktemp("whole") / "out"
    model = str(make_output(path.with_name("first")).model)
    parts = {
        "format_version": "1",
        "model.path": model_digest(model, "tiny", None),
        "model.dtype": "bfloat16",
        "layers": "[2, 4, 5]",
        "capture.final": "pre_norm",
        "max_seq_len": "512",
        "on_too_long": "truncate",
        "input.format": '["tokens"]',
        "input.limit": "null",
        "output.compression": "none",
        "engine.args": '{"quantization": "fp8"}',
        "sglang": "0.5.23",
        "patches/sglang": "abc",
        "engine/models": "native",
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("make_output.FINGERPRINT", digest)
        versions = {"sglang": "0.5.23", "patch": "abc", "capture": "native"}
        patch.setattr("make_output.metadata", lambda made: metadata(made) | {"versions": versions})
        made = make_output(path)

    def complete(run: dict[str, Any]) -> None:
        run["fingerprint_parts"] = parts
        run["versions"] |= {"patch": "abc", "capture": "native"}
        run["sources"] = [{"source": "train.jsonl", "format": "tokens"}]
        run["config"] |= {"layers": [5, 2, 4], "capture": {"final": "pre_norm"}, "max_seq_len": 512}
        run["config"] |= {"on_too_long": "truncate", "input": {"limit": None}}
        run["config"]["engine"] = {"args": {"quantization": "fp8", "random-seed": 3}}

    edit_json(made.path / schema.RUN_JSON, complete)
    return made


@pytest.fixture
def whole(whole_output: MadeOutput, tmp_path: Path) -> MadeOutput:
    return copied(whole_output, tmp_path / "out")


def test_a_whole_one_passes(whole: MadeOutput):
    assert found(whole) == {}


def test_a_fingerprint_that_its_parts_do_not_give(whole: MadeOutput):
    edit_json(whole.path / schema.RUN_JSON, lambda run: run.update(fingerprint="e" * 64))
    problems = found(whole)
    assert problems.keys() == {"fingerprint"} and len(problems["fingerprint"]) == 1
    assert problems["fingerprint"][0].startswith("_run/run.json: fingerprint is eeeeeeeeeeeeeeee..., that of its")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: run["versions"].update(sglang="0.5.17"), "sglang = 0.5.23, elsewhere it is 0.5.17"),
        (lambda run: run["versions"].update(patch=None), "patches/sglang = abc, elsewhere it is null"),
        (lambda run: run["versions"].update(capture="hook"), "engine/models = native, elsewhere it is hook"),
        (lambda run: run["model"].update(digest="0" * 64), "elsewhere it is 0000"),
        (lambda run: run["config"].update(max_seq_len=256), "max_seq_len = 512, elsewhere it is 256"),
        (lambda run: run["config"]["input"].update(limit=7), "input.limit = null, elsewhere it is 7"),
        (lambda run: run["config"]["engine"].update(args={}), "elsewhere it is {}"),
        (lambda run: run["sources"][0].update(format="text"), 'elsewhere it is ["text"]'),
        (lambda run: run["config"].update(layers=[1, 2]), "spec.layers is"),
        (lambda run: run["config"].update(layers=[9]), "config.layers = [9]: 9 is out of range"),
        (lambda run: run["config"]["capture"].update(final="both"), "spec.final is 'pre_norm', it should be 'both'"),
        (lambda run: run["model"].update(hidden_size=32), "spec.hidden_size is 64, model.hidden_size is 32"),
        (lambda run: run["model"].update(num_hidden_layers=9), "spec.num_hidden_layers is 8, model.num_hidden"),
        (lambda run: run["spec"].update(columns=["hidden_2"]), "spec.columns is ['hidden_2'], it should be"),
        (lambda run: run["spec"]["layers"][0].update(output_of_layer=2), "spec.layers is"),
        (lambda run: run.update(fingerprint_parts=[]), "fingerprint_parts is [], not an object"),
    ],
)
def test_what_contradicts_the_rest(whole: MadeOutput, change: Change, told: str):
    """It is run.json that is blamed, and not shards or markers."""
    edit_json(whole.path / schema.RUN_JSON, change)
    problems = found(whole)
    assert problems.keys() == {"run"} and all(text.startswith("_run/run.json: ") for text in problems["run"])
    assert told in "".join(problems["run"])


def test_a_part_that_is_not_what_it_was(whole: MadeOutput):
    edit_json(whole.path / schema.RUN_JSON, lambda run: run["fingerprint_parts"].update(layers="[1]"))
    problems = found(whole)
    assert problems.keys() == {"fingerprint", "run"} and len(problems["fingerprint"]) == 1
    assert problems["run"] == ["_run/run.json: fingerprint_parts has layers = [1], elsewhere it is [2, 4, 5]"]
