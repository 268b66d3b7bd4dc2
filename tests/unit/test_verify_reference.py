"""hs_ray.verify.reference: values against transformers, and how large an error may be."""

import shutil
from pathlib import Path

import pytest
import torch
from make_output import MadeOutput, make_model

from hs_ray import schema
from hs_ray.errors import ConfigError, UnsupportedError
from hs_ray.prove.reference import decoder_parts
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


def test_reference_of_a_wrapper_with_pictures(made: MadeOutput, tmp_path: Path):
    """To transformers its class is no causal language model."""
    from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

    inside = AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.bfloat16)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 8, **tower}
    wrapper = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=inside.config.to_dict())).to(
        torch.bfloat16
    )
    wrapper.model.language_model.load_state_dict(inside.model.state_dict())
    wrapper.save_pretrained(tmp_path / "wrapper")
    report = verify_reference(str(made.path), samples=3, model_path=str(tmp_path / "wrapper"))
    assert report.problems == [] and report.counts["samples_compared"] == 3


def test_a_decoder_that_holds_another():
    """Llama 4 calls its whole model the decoder; the final norm has one more name."""
    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.layers, inner.norm_f, outer.model = torch.nn.ModuleList(), torch.nn.Identity(), inner
    outer.get_decoder = lambda: outer
    assert decoder_parts(outer) == (inner, inner.layers, inner.norm_f)
    del inner.norm_f
    with pytest.raises(UnsupportedError, match="no reference to compare with"):
        decoder_parts(outer)


def test_what_transformers_cannot_use_is_one_message(made: MadeOutput, tmp_path: Path):
    folder = Path(shutil.copytree(made.model, tmp_path / "odd"))
    (folder / "config.json").write_text('{"model_type": "nothing_known"}')
    with pytest.raises(
        ConfigError, match=r"^model_path = \S+odd: transformers cannot load it \((.|\n)*with model_path=$"
    ):
        verify_reference(str(made.path), model_path=str(folder))
    shallow = make_model(tmp_path / "shallow", layers=6)
    with pytest.raises(ConfigError, match=r"model_path = \S+shallow: transformers' model has 6 decoder layers, not 8"):
        verify_reference(str(made.path), model_path=str(shallow))


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
