"""hs_ray.verify.argmax: what the model would say next, out of our final state."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_output import MadeOutput, make_output, rewrite

from hs_ray import schema
from hs_ray.errors import ConfigError
from hs_ray.reader import HiddenStatesDataset
from hs_ray.verify import verify_argmax
from hs_ray.verify.argmax import _compare, _scaled, output_matrix
from hs_ray.verify.report import ReferenceReport

Rows = list[dict[str, Any]]


def test_argmax_is_a_figure(made: MadeOutput):
    report = verify_argmax(str(made.path), samples=99, logprobs=False)
    assert report.ok and "t-1" in report.table[0] and "t+2" in report.table[0]
    assert report.counts["tokens_compared"] > 300


def test_argmax_finds_the_next_token_of_greedy_text(made: MadeOutput):
    """The text is changed so that each next token is the model's choice: what greedy answers are."""
    dataset = HiddenStatesDataset(str(made.path), columns=["final_pre_norm"])
    head = output_matrix(str(made.model), "tiny")

    def change(rows: Rows) -> Rows:
        for row, sample in zip(rows, dataset, strict=False):
            choice = (dataset.to_post_norm(sample["final_pre_norm"]) @ head.T).argmax(-1).numpy()
            row["input_ids"] = np.concatenate([row["input_ids"][:1], choice[:-1]]).astype(np.int32)
        return rows

    rewrite(made, 0, change)
    (made.path / schema.MANIFEST).unlink()
    for unit in (1, 2):
        (made.path / schema.marker_path(unit)).unlink()
    table = verify_argmax(str(made.path), samples=99, incomplete=True, logprobs=False).table
    assert "t+1 100.0%" in table[0]


def test_a_product_that_is_not_all_of_the_logits_has_no_verdict(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"final_logit_softcapping": 30.0}}))
    assert _scaled(str(tmp_path)) == ["final_logit_softcapping"]
    (tmp_path / "config.json").write_text(json.dumps({"final_logit_softcapping": None, "logit_scale": 1.0}))
    assert _scaled(str(tmp_path)) == []
    ours, theirs = np.zeros(9, np.float32), np.full(9, -3, np.float32)
    for scaled, ok in ([], False), (["logit_scale"], True):
        report = ReferenceReport()
        _compare(report, "final_pre_norm", ours, theirs, scaled)
        assert report.ok is ok and report.counts == {"logprobs_compared": 9}
        assert "median difference 3.000" in report.table[0]
    report = ReferenceReport()
    _compare(report, "final_pre_norm", ours, np.full(9, np.nan, np.float32), [])
    assert not report.ok


def test_argmax_needs_a_final_state(tmp_path: Path):
    made = make_output(tmp_path / "out", final="none")
    with pytest.raises(ConfigError, match="needs a final state"):
        verify_argmax(str(made.path))
