"""The final norm's file: what verify says of one that is missing, damaged or another model's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from damage import edit_json, flip_bit, found
from make_output import H, MadeOutput, N, make_output, rewrite, write_norm

from hs_ray import schema
from hs_ray.model import ModelInfo
from hs_ray.pipeline.driver import _write_final_norm
from hs_ray.reader import FinalNorm, load_final_norm
from hs_ray.storage import open_storage
from hs_ray.verify import verify_reference
from hs_ray.verify.norm import LIMIT, norm_error
from hs_ray.weights import norm_digest

Rows = list[dict[str, Any]]


def norm_of(made: MadeOutput) -> FinalNorm:
    return load_final_norm(open_storage(str(made.path)))


def told(made: MadeOutput) -> str:
    """The one problem, which is of the norm's file."""
    problems = found(made)
    assert problems.keys() == {"norm"} and len(problems["norm"]) == 1
    return problems["norm"][0].removeprefix(f"{schema.FINAL_NORM}: ")


def test_missing(made: MadeOutput):
    (made.path / schema.FINAL_NORM).unlink()
    assert told(made) == "missing; without it pre-norm states cannot become post-norm ones"


def test_missing_where_no_pre_norm_state_is(tmp_path: Path):
    """A norm that three kinds do not describe cannot be kept: such a model is captured with post_norm."""
    made = make_output(tmp_path / "out", final="post_norm")
    (made.path / schema.FINAL_NORM).unlink()
    assert found(made) == {}


@pytest.mark.parametrize(
    ("weight", "facts", "text"),
    [
        (torch.ones(H - 1), {}, "its weight is torch.float32 [63], the states have width 64"),
        (torch.ones(1, H), {}, "its weight is torch.float32 [1, 64], the states have width 64"),
        (torch.ones(H, dtype=torch.int32), {}, "its weight is torch.int32 [64], the states have width 64"),
        (torch.tensor([float("nan"), float("inf")] + [1.0] * (H - 2)), {}, "2 of 64 weights are NaN or infinite"),
        (torch.ones(H), {"eps": "nan"}, "its eps is nan"),
        (torch.ones(H), {"eps": "-1.0"}, "its eps is -1.0"),
        (torch.ones(H), {"eps": "small"}, "cannot be used"),
        (torch.ones(H), {"kind": "batch_norm"}, "cannot be used"),
    ],
)
def test_what_cannot_be_applied(made: MadeOutput, weight: torch.Tensor, facts: dict[str, str], text: str):
    write_norm(made, weight, **facts)
    assert text in told(made)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0[1, 2] \n", b"\xff" * 200])
def test_no_safetensors_file(made: MadeOutput, content: bytes):
    (made.path / schema.FINAL_NORM).write_bytes(content)
    assert "cannot be used" in told(made)


def test_a_flipped_bit(made: MadeOutput):
    """Files that have no digest of themselves pass; those that have one are read back bit by bit."""
    path, norm = made.path / schema.FINAL_NORM, norm_of(made)
    flip_bit(path, -1, 1)
    assert found(made) == {}
    write_norm(made, norm.weight, sha256=norm_digest(norm.weight, 1e-6, "rms_norm"))
    assert found(made) == {}
    flip_bit(path, -1, 1)
    assert "is not what was written" in told(made)


@pytest.mark.parametrize("facts", [{"eps": "1e-05"}, {"kind": "rms_norm_plus_one"}])
def test_the_digest_is_of_eps_and_kind_too(made: MadeOutput, facts: dict[str, str]):
    weight = norm_of(made).weight
    write_norm(made, weight, sha256=norm_digest(weight, 1e-6, "rms_norm"), **facts)
    assert "is not what was written" in told(made)


def test_the_driver_writes_the_digest(made: MadeOutput):
    info = ModelInfo(**_run(made)["model"])
    storage = open_storage(str(made.path))
    _write_final_norm(storage, SimpleNamespace(model=info, spec=made.spec))  # type: ignore[arg-type]
    assert b"sha256" in (made.path / schema.FINAL_NORM).read_bytes()
    assert found(made) == {} and verify_reference(str(made.path), samples=2).ok
    flip_bit(made.path / schema.FINAL_NORM, -2, 0)
    assert "is not what was written" in told(made)


def test_the_reference_knows_the_norm(made: MadeOutput):
    """Another norm of the right shape: nothing of the output itself tells."""
    weight = norm_of(made).weight.clone()
    weight[5] *= -1
    write_norm(made, weight)
    assert found(made) == {}
    problems = verify_reference(str(made.path), samples=3).problems
    assert [problem.check for problem in problems] == ["norm"]
    assert "is not the model's final norm" in problems[0].detail
    (made.path / schema.FINAL_NORM).unlink()
    assert [problem.check for problem in verify_reference(str(made.path), samples=1).problems] == ["norm"]


# ---- the states before and after it ----


@pytest.mark.parametrize(
    ("layers", "final", "before"), [((2,), "both", "final_pre_norm"), ((2, N), "post_norm", "hidden_8")]
)
@pytest.mark.parametrize("damage", ["shifted", "exchanged", "without weight"])
def test_after_is_the_norm_of_before(tmp_path: Path, layers: tuple[int, ...], final: str, before: str, damage: str):
    """What the capture takes wrongly, the device's checksums are of: only the one column against the other tells."""
    made = make_output(tmp_path / "out", layers=layers, final=final)
    assert found(made) == {}
    after, unit_norm = "final_post_norm", FinalNorm(torch.ones(H), 1e-6, "rms_norm")

    def change(rows: Rows) -> Rows:
        row = rows[2]  # 64 tokens and more
        if damage == "shifted":
            row[after] = np.roll(row[after], 1, axis=0)
        elif damage == "exchanged":
            row[before], row[after] = row[after], row[before]
        else:
            bits = torch.from_numpy(row[before].view(np.int16)).view(torch.bfloat16)
            row[after] = unit_norm(bits).view(torch.int16).numpy().view(np.uint16)
        return rows

    rewrite(made, 0, change, fit_checksums=True)
    problems = found(made)
    assert problems.keys() <= {"columns", "prefix"} and len(problems["columns"]) == 1
    assert "sample 'id-2', token " in problems["columns"][0]
    assert f"{after} is not the norm of {before}, it differs by " in problems["columns"][0]


def test_a_nan_is_told_once(tmp_path: Path):
    made = make_output(tmp_path / "out", final="both")

    def change(rows: Rows) -> Rows:
        for name in ("final_pre_norm", "final_post_norm"):
            rows[0][name][20, 5] = 0x7FC0
        return rows

    rewrite(made, 0, change, fit_checksums=True)
    assert found(made).keys() == {"nonfinite"}


def test_the_fused_kernels_rounding_is_allowed():
    """It takes the norm of the sum of two states before it rounds that sum to bf16."""
    parts = torch.randn(2, 500, 256).bfloat16().float() * torch.logspace(-2, 2, 500)[:, None]
    total = parts.sum(0)
    total[:, 7] *= 200  # an outlier channel, as large models have them
    norm = FinalNorm(torch.randn(256), 1e-6, "rms_norm")
    pre, post = (x.bfloat16().view(torch.int16).numpy().view(np.uint16) for x in (total, norm(total)))
    assert norm_error(norm, pre, post)[1] < LIMIT / 5
    assert norm_error(norm, pre, np.roll(post, 1, axis=0))[1] > LIMIT * 5


def _run(made: MadeOutput) -> dict[str, dict[str, str]]:
    kept: dict[str, dict[str, str]] = {}
    edit_json(made.path / schema.RUN_JSON, kept.update)
    return kept
