"""Proof by training: drafters from right states and from three kinds of wrong ones, judged by what they guess.

    python tests/probe/probe.py --work /dev/shm/probe --trainer .venvs/specforge/bin/python

SmolLM2 writes answers, the job extracts their states, `spoil.py` makes the wrong outputs, `jobs/verify.py` judges each
one before training, SpecForge trains a drafter from each, SGLang runs it. Each step is a command that is printed and
not done again; what came out is WORK/result.json (docs/trainers.md). A verdict that is not the expected one stops it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hs_ray.builtin_models import builtin_folder

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LAYERS, ABOVE = [2, 15, 27], [3, 16, 28]
SPOILED = ("shifted", "wrong_norm", "swapped")
OUTPUTS = ("right", *SPOILED)
JOB = ("cluster.address=local", "capture.final=pre_norm", "capture.prove=never", "max_seq_len=512")


@dataclass(frozen=True)
class Step:
    """A command, the exit code that it must have, and what a cut-off one left behind and has to go first."""

    name: str
    command: list[str]
    code: int = 0
    leaves: Path | None = None


@dataclass(frozen=True)
class Probe:
    """The commands, in order; each one writes under `work` alone."""

    work: Path
    model: Path
    trainer: str
    device: str
    samples: int
    held_out: int
    tokens: int
    steps: int
    draft_vocab: int
    gpus: int

    def run(self) -> None:
        self.together(self.answers("train", self.samples), self.answers("held_out", self.held_out))
        self.together(
            self.extract("right", "train", LAYERS),
            self.extract("above", "train", ABOVE),
            self.extract("held_out", "held_out", LAYERS),
        )
        self.together(self.export("held_out"), *(self.spoil(kind) for kind in SPOILED))
        with ThreadPoolExecutor(len(OUTPUTS)) as pool:
            list(pool.map(self.judge_and_train, OUTPUTS))

    def judge_and_train(self, name: str) -> None:
        gpu = OUTPUTS.index(name)
        self.together(self.verify(name), self.export(name))
        self.together(self.train(name), gpu=gpu)
        if self.device == "cuda":
            self.together(self.accept(name), gpu=gpu)

    # --- the steps: a name and a command ---

    def answers(self, name: str, number: int) -> Step:
        keys = ["--number", str(number), "--tokens", str(self.tokens), "--device", self.device]
        held = ["--held-out"] if name == "held_out" else []
        script = [sys.executable, str(HERE / "answers.py"), str(self.model), str(self.work / f"{name}.jsonl")]
        return Step(f"answers-{name}", script + keys + held)

    def extract(self, name: str, source: str, layers: list[int]) -> Step:
        memory = ["engine.mem_fraction_static=0.8", "+engine.args.max_total_tokens=131072"]
        engine = ["engine.attention_backend=triton", *memory] if self.device == "cuda" else []
        keys = [f"input.path={self.work}/{source}.jsonl", f"output.path={self.work}/{name}", f"layers={layers}"]
        model = f"model.path={self.model}"
        return Step(f"extract-{name}", [sys.executable, "jobs/extract.py", model, *keys, *JOB, *engine])

    def spoil(self, kind: str) -> Step:
        spoiled = self.work / kind
        above = ["--above", str(self.work / "above")] if kind == "shifted" else []
        script = [sys.executable, str(HERE / "spoil.py"), kind, str(self.work / "right"), str(spoiled)]
        return Step(f"spoil-{kind}", [*script, *above, "--workers", "4"], leaves=spoiled)

    def verify(self, name: str) -> Step:
        keys = [f"output.path={self.work}/{name}", "verify.reference=hf", f"verify.device={self.device}"]
        return Step(f"verify-{name}", [sys.executable, "jobs/verify.py", *keys], code=int(name in SPOILED))

    def export(self, name: str) -> Step:
        paths = [f"output.path={self.work}/{name}", f"export.path={self.work}/export-{name}"]
        keys = ["export.to=specforge", f"export.draft_vocab_size={self.draft_vocab}", "export.workers=4"]
        return Step(f"export-{name}", [sys.executable, "jobs/export.py", *paths, *keys])

    def train(self, name: str) -> Step:
        folders = [str(self.work / f"export-{folder}") for folder in (name, "held_out")]
        batch = min(16, self.samples // 2)
        keys = ["--steps", str(self.steps), "--batch", str(batch), "--draft-vocab", str(self.draft_vocab)]
        drafter = self.work / f"drafter-{name}"
        script = [self.trainer, str(HERE / "train.py"), str(self.model), *folders, str(drafter)]
        return Step(f"train-{name}", script + keys, leaves=drafter)

    def accept(self, name: str) -> Step:
        drafter, held_out = self.work / f"drafter-{name}/drafter", self.work / "held_out.jsonl"
        script = [sys.executable, str(HERE / "accept.py"), str(self.model), str(drafter), str(held_out)]
        return Step(f"accept-{name}", [*script, str(self.work / f"accept-{name}.json")])

    # --- running them ---

    def together(self, *steps: Step, gpu: int = 0) -> None:
        """Run steps at once, the first on this GPU, each further one on the next."""
        with ThreadPoolExecutor(len(steps)) as pool:
            done = list(pool.map(self.step, steps, range(gpu, gpu + len(steps))))
        failed = [step.name for step, ok in zip(steps, done, strict=True) if not ok]
        if failed:
            raise SystemExit(f"failed: {', '.join(failed)}; see {self.work}/steps")

    def step(self, step: Step, gpu: int) -> bool:
        """Run it, unless it was done; whether it came out as it must."""
        steps = self.work / "steps"
        steps.mkdir(parents=True, exist_ok=True)
        code_file = steps / f"{step.name}.rc"
        if not code_file.exists():
            if step.leaves is not None:
                shutil.rmtree(step.leaves, ignore_errors=True)
            started = time.monotonic()
            print(f"{step.name}: {' '.join(step.command)}", flush=True)
            environment = os.environ | {"PROBE_DEVICE": self.device}
            if self.device == "cuda":
                environment["CUDA_VISIBLE_DEVICES"] = str(gpu % self.gpus)
            with (steps / f"{step.name}.log").open("w") as log:
                done = subprocess.run(step.command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
            print(f"{step.name}: exit code {done.returncode} after {time.monotonic() - started:.0f} s", flush=True)
            if done.returncode != step.code:
                return False
            code_file.write_text(str(done.returncode))
        return True

    # --- what came out ---

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {"samples": self.samples, "held_out": self.held_out, "steps": self.steps}
        counts = json.loads((self.work / "right/manifest.json").read_text())["counts"]
        found |= {"tokens": counts["tokens"], "draft_vocab": self.draft_vocab, "outputs": {}}
        for name in OUTPUTS:
            log = (self.work / f"steps/verify-{name}.log").read_text()
            trained = json.loads((self.work / f"drafter-{name}/result.json").read_text())
            accepted = self.work / f"accept-{name}.json"
            found["versions"] = trained["versions"]
            found["outputs"][name] = {
                "verify_exit_code": int((self.work / f"steps/verify-{name}.rc").read_text()),
                "verify": [line for line in log.splitlines() if line.startswith(("integrity:", "reference hf:"))],
                "top1": trained["eval/avg_acc"],
                "by_position": trained["eval/per_position_acc"],
                "loss": trained["eval/avg_loss"],
                "accepted_length": json.loads(accepted.read_text())["accepted_length"] if accepted.exists() else None,
            }
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--trainer", default=".venvs/specforge/bin/python", help="python with specforge")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=384, help="of an answer, at most")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    given = parser.parse_args()
    probe = Probe(model=builtin_folder("builtin:smollm2"), **vars(given))
    probe.run()
    result = probe.result()
    (given.work / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
