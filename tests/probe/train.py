"""Trains an EAGLE-3 drafter with SpecForge's own command line on one of our exports. In SpecForge's environment.

    python tests/probe/train.py MODEL EXPORT HELD_OUT_EXPORT RESULT --steps 1200 --batch 16 --draft-vocab 16384

RESULT/drafter is what SGLang loads; RESULT/result.json has the losses and SpecForge's own figures over the held-out
samples, of whose states nothing is wrong whatever the drafter learnt from: that is what it meets in use.
"""

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
DEVICE = os.environ.get("PROBE_DEVICE", "cuda")
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than this trains
if DEVICE == "cpu":
    import no_triton  # noqa: F401  (must come before specforge)

from specforge import cli  # noqa: E402  (after no_triton)
from specforge.eval import Evaluator  # noqa: E402  (after no_triton)
from specforge_run import draft_config, export_drafter, run_config, target_folder  # noqa: E402  (after no_triton)

LAYER_IDS = [2, 15, 27]  # layers=eagle3 of SmolLM2's 30
MAX_LENGTH = 512


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("model", "export", "held_out", "result"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--draft-vocab", type=int, required=True)
    given = parser.parse_args()
    given.result.mkdir(parents=True)
    target = target_folder(given.model, given.result / "target")
    mapping = given.export / "vocab_mapping/vocab_mapping.pt"
    run = run_config(target, given.export, mapping, given.result, "bfloat16")
    run["data"] |= {
        "max_length": MAX_LENGTH,
        "eval_hidden_states_path": str(given.held_out / "data"),
        "dataloader_num_workers": 4,
    }
    run["training"] |= {
        "num_epochs": 1000,
        "max_steps": given.steps,
        "batch_size": given.batch,
        "ttt_length": 5,
        "eval_interval": given.steps,
        "log_interval": max(1, given.steps // 20),
    }
    config = json.loads((given.model / "config.json").read_text())
    (given.result / "draft.json").write_text(json.dumps(draft_config(config, given.draft_vocab, LAYER_IDS)))
    (given.result / "run.json").write_text(json.dumps(run))
    found: list[dict[str, Any]] = []
    evaluate = Evaluator.run

    def kept(self: Evaluator, *args: Any) -> dict[str, Any]:
        found.append(evaluate(self, *args))
        return found[-1]

    Evaluator.run = kept
    code: int = cli.main(["train", "-c", str(given.result / "run.json")]) or export_drafter(given.result, mapping)
    if code:
        return code
    versions = {name: version(name) for name in ("specforge", "torch", "transformers")}
    (given.result / "result.json").write_text(json.dumps({"versions": versions, **found[-1]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
