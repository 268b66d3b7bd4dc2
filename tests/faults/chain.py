"""A run that is killed again and again: each resume is the next victim, and the output is judged after each.

A chain is a function of its seed, but for the moments at which processes happen to be where a kill finds them.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scripted import TOKENS_PER_S, WRITER_FAILS_AT, states_of

from hs_ray.pipeline.actor import START_DEATHS
from hs_ray.reader import HiddenStatesDataset
from hs_ray.schema import ATTEMPTS, DONE, TMP
from hs_ray.storage import Storage, open_storage
from hs_ray.verify import verify_integrity

HERE = Path(__file__).parent
SCRIPTED, REAL = HERE / "scripted.py", HERE.parents[1] / "jobs/extract.py"
ACTOR, SCHEDULER, BOARD = "MapWorker(", "sglang::scheduler", "ray::Board"
RUN_S, CLEANUP_S = 600, 30


def write_samples(path: Path, seed: int, count: int, longest: int) -> dict[str, np.ndarray]:
    """Samples of random lengths and tokens as JSONL -> {id: int32 [S]}."""
    rng = np.random.default_rng(seed)
    samples = {f"s{i}": rng.integers(0, 49152, rng.integers(1, longest + 1), dtype=np.int32) for i in range(count)}
    path.write_text("".join(json.dumps({"id": k, "input_ids": v.tolist()}) + "\n" for k, v in samples.items()))
    return samples


class Victim:
    """One start of the driver, in a session of its own; what descends from it carries a mark in its environment."""

    def __init__(self, script: Path, words: list[str], log: Path, environment: Mapping[str, str], folder: Path):
        self.temporary = Path(tempfile.mkdtemp(prefix="hsr-", dir="/tmp"))  # short: sockets are put there
        self.mark = f"HS_RAY_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
        self.shared_memory = _names_in_shared_memory()
        self.log = log
        name, value = self.mark.split("=")
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *words],
                stdout=file,
                stderr=file,
                cwd=folder,
                env={**os.environ, "TMPDIR": str(self.temporary), "RAY_TMPDIR": "/tmp", **environment, name: value},
            )

    def find(self, name: str) -> list[int]:
        """Pids of its processes whose title holds `name`."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                titled = entry.name.isdigit() and name.encode() in (entry / "cmdline").read_bytes()
                if titled and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill_one(self, name: str, rng: random.Random, patience_s: float) -> bool:
        """SIGKILL to one such process once there is one; False if the driver ended before."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and self.process.poll() is None:
            found = self.find(name)
            if found:
                os.kill(rng.choice(found), signal.SIGKILL)
                return True
            time.sleep(0.05)
        return False

    def kill(self) -> bool:
        """SIGKILL to the driver; False if it had ended."""
        alive = self.process.poll() is None
        self.process.kill()
        self.process.wait()
        return alive

    def wait(self) -> int:
        return self.process.wait(RUN_S)

    def leftovers(self) -> list[str]:
        """What it left, after the seconds that its janitors may take: processes, names in /dev/shm, temporary files."""
        deadline = time.monotonic() + CLEANUP_S
        while True:
            left = [Path(f"/proc/{pid}/cmdline").read_text()[:60] for pid in self.find("")]
            left += sorted(_names_in_shared_memory() - self.shared_memory)
            # An engine's folder. Any library of a killed driver may leave a temporary file of its own beside it.
            left += map(str, self.temporary.glob("hs-*"))
            if not left or time.monotonic() > deadline:
                shutil.rmtree(self.temporary)
                return left
            time.sleep(0.1)


def _names_in_shared_memory() -> set[str]:
    """Of ours and of those that we start; Ray's own memory has a cluster's life."""
    ours = ("hs_ray", "sgl", "sem.", "psm_", "torch_")
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(ours)}


class Chain:
    """An output that has to be complete in the end, whatever happens on the way."""

    def __init__(self, script: Path, output: str, words: list[str], samples: dict[str, np.ndarray], log: Path):
        self.script, self.output, self.samples, self.log = script, output, samples, log
        self.words = [*words, f"output.path={output}"]
        self.options: dict[str, Any] = {}  # output.storage_options
        self.environment: dict[str, str] = {}
        self.folder = HERE
        self.counts: Counter[str] = Counter()

    @property
    def storage(self) -> Storage:
        return open_storage(self.output, self.options)

    def start(self, **environment: str) -> Victim:
        options = [f"+output.storage_options.{key}={value}" for key, value in self.options.items()]
        return Victim(self.script, [*self.words, *options], self.log, {**self.environment, **environment}, self.folder)

    def committed(self) -> int:
        return len(self.storage.list(DONE))

    def judge(self, victim: Victim, finished: bool) -> None:
        """Nothing torn, nothing double, nothing wrong, nothing left; and nothing lost once it is finished."""
        self.counts["judged"] += 1
        left = victim.leftovers()
        assert left == [], f"{left}\n{self.tail()}"
        storage = self.storage
        if not storage.exists("_run/run.json"):
            assert not finished and self.committed() == 0
            return
        report = verify_integrity(storage, incomplete=not finished)
        assert report.ok, "\n".join(report.lines())
        seen = self.read(incomplete=not finished)
        if finished:
            assert seen == set(self.samples)
            assert storage.list(TMP) == [] and storage.list(ATTEMPTS) == []

    def read(self, incomplete: bool) -> set[str]:
        """Every sample that is there, each of them once and, from a scripted engine, right to the last bit."""
        dataset = HiddenStatesDataset(self.output, incomplete=incomplete, storage_options=self.options)
        columns, hidden = dataset.columns, dataset.output.spec.hidden_size
        seen: set[str] = set()
        for index in range(len(dataset)):
            sample = dataset[index]
            name, ids = sample["sample_id"], sample["input_ids"].numpy().astype(np.int32)
            assert name not in seen
            seen.add(name)
            assert np.array_equal(ids, self.samples[name])
            if self.script == SCRIPTED:
                for column, bits in zip(columns, states_of(ids, len(columns), hidden), strict=True):
                    assert np.array_equal(sample[column].view(torch.uint16).numpy(), bits), f"{name}: {column}"
        return seen

    def finish(self) -> None:
        """The last start: it must end by itself, with everything."""
        victim = self.start()
        assert victim.wait() == 0, self.tail()
        self.judge(victim, finished=True)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def kill_often(chain: Chain, rng: random.Random, kills: int, kinds: list[str], longest_s: float) -> None:
    """So many kills, of kinds drawn from `kinds`; a start goes on until its driver is killed or it is through."""
    while sum(chain.counts[kind] for kind in set(kinds)) < kills:
        dying = {WRITER_FAILS_AT: f"{rng.randrange(1, 40)}-"} if "writer" in kinds and rng.random() < 0.2 else {}
        victim = chain.start(**dying)
        finished = _strike(chain, victim, rng, kinds, longest_s, bool(dying))
        chain.judge(victim, finished)
        if finished:
            return


def _strike(chain: Chain, victim: Victim, rng: random.Random, kinds: list[str], longest_s: float, dying: bool) -> bool:
    """Kill parts of one start until its driver dies or ends -> whether it is through.

    An engine that dies START_DEATHS times in a row while it starts ends the run, so it may come up before that.
    """
    if dying:
        code = victim.wait()
        chain.counts["writer"] += code == 1
        assert code in (0, 1), chain.tail()
        return code == 0
    in_a_row = 0
    while True:
        kind = rng.choice([kind for kind in kinds if kind != "writer"])
        if kind == "driver":
            if rng.random() < 0.7:  # else anywhere, planning and starting among it
                _wait_for_an_actor(victim)
            time.sleep(rng.uniform(0, longest_s))
            killed = victim.kill()
            chain.counts["driver"] += killed
            return not killed and victim.wait() == 0
        time.sleep(rng.uniform(0, longest_s))
        if not victim.kill_one({"actor": ACTOR, "scheduler": SCHEDULER}[kind], rng, RUN_S):
            assert victim.wait() == 0, chain.tail()
            return True
        chain.counts[kind] += 1
        in_a_row += 1
        if in_a_row == START_DEATHS - 1:
            _wait_for_a_unit(chain, victim)
            in_a_row = 0


def _wait_for_a_unit(chain: Chain, victim: Victim) -> None:
    deadline, before = time.monotonic() + RUN_S, chain.committed()
    while time.monotonic() < deadline and victim.process.poll() is None and chain.committed() == before:
        time.sleep(0.1)


def _wait_for_an_actor(victim: Victim) -> None:
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline and victim.process.poll() is None and not victim.find(ACTOR):
        time.sleep(0.05)


def scripted_chain(folder: Path, output: str, seed: int, count: int = 400, tokens_per_s: int = 1500) -> Chain:
    """A chain of small units that takes count * 100 / tokens_per_s seconds in all, start-up apart."""
    samples = write_samples(folder / "in.jsonl", seed, count, longest=200)
    words = [
        "cluster.address=local",
        "model=tiny_random",
        f"input.path={folder}/in.jsonl",
        "output.shard_bytes=300KB",
        "output.min_free_bytes=1MB",
        "capture.canary=false",
        "capture.prove=never",
        "engine.device=cpu",
        "cluster.lease_seconds=4",
        "cluster.max_retries=20",
        "cluster.progress_seconds=1",
    ]
    chain = Chain(SCRIPTED, output, words, samples, folder / "log")
    chain.environment = {TOKENS_PER_S: str(tokens_per_s), "PYTHONPATH": str(HERE)}
    return chain
