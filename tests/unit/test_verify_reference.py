"""hs_ray.verify.reference: values against transformers, and how large an error may be."""

import shutil
from pathlib import Path

import pytest
import torch
from make_output import MadeOutput

from hs_ray import schema
from hs_ray.errors import ConfigError
from hs_ray.verify import verify_reference
from hs_ray.verify.reference import Errors, _judge
from hs_ray.verify.report import ReferenceReport


def test_reference_passes_and_needs_the_model(made: MadeOutput):
    report = verify_reference(str(made.path), samples=5)
    assert report.ok and report.counts["samples_compared"] == 5
    assert [line.split()[0] for line in report.table[1:]] == list(made.spec.columns)
    with pytest.raises(ConfigError, match="model_path"):
        verify_reference(str(made.path), model_path=str(made.path))


def test_reference_wants_the_model_of_the_run(made: MadeOutput, tmp_path: Path):
    other = Path(shutil.copytree(made.model, tmp_path / "other"))
    with (other / "config.json").open("a") as file:
        file.write("\n")
    report = verify_reference(str(made.path), samples=2, model_path=str(other))
    assert "holds other files than the model" in report.table[0]  # a copy in another precision may be wanted
    run = made.path / schema.RUN_JSON
    run.write_text(run.read_text().replace(str(made.model), str(other)))
    with pytest.raises(ConfigError, match="no longer those that the output was made with"):
        verify_reference(str(made.path))


# ---- the limits: errors as they were seen, made by hand. S tokens, H = 64, 8 samples ----

SAMPLES, S, H = 8, 50, 64
EXTREME = 500.0  # the size of a first token that decides the `norm` error, beside others of 1


def judged(ours_first: float, theirs_first: float, ours: float = 0.011, theirs: float = 0.011) -> list[str]:
    """What is said of errors that are, relative, these: of every sample's extreme first token, and of the others."""
    generator = torch.Generator().manual_seed(0)
    pair, names = (Errors(), Errors()), [(f"id-{i}", "shard") for i in range(SAMPLES)]
    for _ in names:
        truth = torch.nn.functional.normalize(torch.randn(S, H, generator=generator), dim=1)
        truth[0] *= EXTREME
        for errors, first, rest in zip(pair, (ours_first, theirs_first), (ours, theirs), strict=True):
            noise = torch.nn.functional.normalize(torch.randn(S, H, generator=generator), dim=1)
            size = torch.full((S,), rest)
            size[0] = first
            errors.add(truth + noise * (size * truth.norm(dim=1))[:, None], truth)
    report = ReferenceReport()
    _judge(report, "hidden_2", *pair, names)
    return [problem.detail for problem in report.problems]


def test_a_lucky_draw_of_the_bf16_run_is_no_yardstick():
    assert judged(0.0129, 0.0030) == []  # the one first token of all samples, its rounding better than that of others
    assert judged(0.0030, 0.0129) == []


def test_a_wrong_extreme_token_fails():
    told = judged(0.03, 0.0030)
    assert told[0] == "column hidden_2: relative error (norm) 0.0300, 0.0163 allowed (bf16 run times 1.5)"
    assert "column hidden_2: relative error (norm) nan" in judged(float("nan"), 0.003)[0]
    of_samples = [text for text in judged(1.4, 0.0030) if text.startswith("sample 'id-")]  # another token's state
    assert len(of_samples) == SAMPLES


def test_a_wrong_layer_fails():
    told = judged(0.3, 0.0030, ours=0.3)
    assert "(norm) 0.3000" in told[0] and "(token) 0.3000, 0.0163 allowed" in told[1]
    assert sum("the sample's relative error" in text for text in told) == SAMPLES
    assert [text for text in judged(0.0030, 0.0030, ours=0.018) if "(token)" in text]  # the extreme tokens hide nothing
