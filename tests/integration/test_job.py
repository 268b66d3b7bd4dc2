"""The whole job as a user runs it: real engine, real Ray, real files; run again, damaged, killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hs_ray.reader import HiddenStatesDataset
from hs_ray.schema import FINAL_NORM, MANIFEST, CaptureSpec
from hs_ray.storage import open_storage
from hs_ray.verify import argmax, verify_integrity, verify_reference

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent.parent
JOB_S = 900
BEFORE = {path.name for path in Path("/dev/shm").iterdir()}  # not ours to judge
LENGTHS = (1, 127, 128, 129, 255, 256, 257, 512)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs/extract.py"), "cluster.address=local", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=JOB_S, env={**os.environ, **environment}, cwd="/"
    )


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_behind() -> list[str]:
    """Our processes and files in /dev/shm that a finished job must not leave."""
    ours = ("sglang_loads", "sgl_", "hs_ray")
    found = [name for name in shared_memory() - BEFORE if name.startswith(ours)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if MARK.encode() in environment and ("sglang" in words or "ray::" in words or "janitor" in words):
                found.append(words)
    return found


MARK = f"HS_RAY_TEST_MARK={os.getpid()}"
ENV = dict([MARK.split("=", 1)])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids of every length around the chunk, and a chat."""
    rng = np.random.default_rng(0)
    lines = [{"id": f"len-{n}", "input_ids": rng.integers(0, 49152, n).tolist()} for n in LENGTHS]
    path = tmp_path_factory.mktemp("input") / "tokens.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """A finished run of SmolLM2, the real model, in small units."""
    out = tmp_path_factory.mktemp("output") / "hs"
    done = run(*words(source, out), **ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_behind() == []
    return out


def words(source: Path, out: Path) -> list[str]:
    return [
        f"input.path={source}",
        f"output.path={out}",
        "layers=[3,7,20]",
        "max_seq_len=512",
        "engine.chunked_prefill_size=128",
        "output.shard_bytes=1MB",
    ]


def units(out: Path) -> set[str]:
    return {path.stem for path in (out / "_run/done").iterdir()}


def test_every_token_has_its_states_and_they_are_transformers(output: Path, smollm2: Path) -> None:
    """By token, over all samples: in one sample a single token of huge norm (SmolLM2's first) drowns the others."""
    dataset = HiddenStatesDataset(str(output))
    spec = CaptureSpec((3, 7, 20), "pre_norm", 30, 576)
    seen = {}
    ours: dict[str, list[torch.Tensor]] = {name: [] for name in spec.columns}
    own: dict[str, list[torch.Tensor]] = {name: [] for name in spec.columns}
    for index in range(len(dataset)):
        sample = dataset[index]
        ids = sample["input_ids"].numpy().astype(np.int32)
        seen[sample["sample_id"]] = len(ids)
        exact = reference.states(smollm2, ids, spec, torch.float32)
        rounded = reference.states(smollm2, ids, spec, torch.bfloat16)
        for name, wide, bf16 in zip(spec.columns, exact, rounded, strict=True):
            assert tuple(sample[name].shape) == (len(ids), 576)
            assert sample[name].dtype == torch.bfloat16
            ours[name].append(reference.by_token(sample[name].float(), wide))
            own[name].append(reference.by_token(bf16, wide))
    assert seen == {f"len-{n}": n for n in LENGTHS}
    for name in spec.columns:
        found, limit = (float(torch.cat(errors).square().mean().sqrt()) for errors in (ours[name], own[name]))
        assert found <= 1.5 * limit, f"{name}: {found:.4f}, transformers' own bf16 {limit:.4f}"


def test_argmax_agrees_with_the_engine_and_not_with_another_norm(output: Path, tmp_path: Path) -> None:
    """Random tokens: what comes next is never likely, and its log-probability is right all the same."""
    right = argmax.verify_argmax(str(output), samples=99)
    assert right.ok, right.table
    assert right.counts["logprobs_compared"] == sum(LENGTHS) - len(LENGTHS)
    copy = shutil.copytree(output, tmp_path / "copy")
    with safe_open(copy / FINAL_NORM, framework="pt") as file:
        weight, metadata = torch.ones_like(file.get_tensor("weight")), file.metadata()
    manifest = json.loads((copy / MANIFEST).read_text())
    del metadata["sha256"], manifest["final_norm"]  # its own digest would give it away, and the run's
    (copy / MANIFEST).write_text(json.dumps(manifest))
    save_file({"weight": weight}, copy / FINAL_NORM, metadata=metadata)
    wrong = argmax.verify_argmax(str(copy), samples=99)
    assert [problem.check for problem in wrong.problems] == ["logprobs"], wrong.table


def test_verify_agrees(output: Path) -> None:
    assert verify_integrity(open_storage(str(output))).ok
    report = verify_reference(str(output), samples=8)
    assert report.ok, "\n".join(report.lines())


def test_running_again_does_nothing_and_says_so(output: Path, source: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (output / "shards").iterdir()}
    done = run(*words(source, output))
    assert done.returncode == 0
    assert "nothing to do: every unit is committed" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (output / "shards").iterdir()} == before


def test_lost_units_alone_are_done_again(output: Path, source: Path) -> None:
    """A marker removed, and a shard torn: two units to redo, the others untouched."""
    marker, torn = sorted((output / "_run/done").iterdir())[:2]
    shard = output / json.loads(torn.read_text())["shard"]
    marker.unlink()
    shard.write_bytes(shard.read_bytes()[:-100])
    before = {path.name for path in (output / "shards").iterdir()} - {shard.name}
    count = len(units(output)) + 1
    done = run(*words(source, output), **ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming: {count - 2} of {count} units are committed and are not done again" in done.stdout
    assert verify_integrity(open_storage(str(output))).ok
    assert len({path.name for path in (output / "shards").iterdir()} & before) == count - 2
    assert left_behind() == []


BOTH = "capture.final=both"  # verify holds the state after the final norm against the one before it


@pytest.fixture
def killed(tmp_path: Path, source: Path) -> Path:
    """An output whose driver was killed with -9 once its first unit was committed."""
    out = tmp_path / "hs"
    command = [sys.executable, str(ROOT / "jobs/extract.py"), "cluster.address=local", *words(source, out), BOTH]
    driver = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **ENV}, cwd="/"
    )
    done = out / "_run/done"
    deadline = time.monotonic() + JOB_S
    while time.monotonic() < deadline and not (done.is_dir() and len(list(done.iterdir())) >= 1):
        assert driver.poll() is None
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    return out


def test_a_killed_driver_leaves_nothing_and_the_next_run_goes_on(killed: Path, source: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and left_behind():
        time.sleep(0.2)
    assert left_behind() == []
    kept = len(units(killed))
    done = run(*words(source, killed), BOTH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming: {kept} of" in done.stdout
    report = verify_integrity(open_storage(str(killed)))
    assert report.ok and report.counts["norms"] == len(LENGTHS), "\n".join(report.lines())
    assert list((killed / "_run/tmp").iterdir()) == []
    assert list((killed / "_run/attempts").iterdir()) == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("layers=[3,99]", "layers = [3, 99]: 99 is out of range for 30 decoder layers"),
        ("layers=[]", "layers = []: ids from 0"),
        ("layers=[3,3]", "layers = [3, 3]: [3] given more than once"),
        ("engine.typo=1", "engine.typo = 1: no such key"),
        ("+engine.typo=1", "engine.typo = 1: no such key"),
        ("max_seq_len=0", "max_seq_len = 0: a whole number of tokens"),
        ("input.path=/nowhere", "input.path = /nowhere: no such file"),
        ("+engine.args.disable_radix_cache=false", "the prefix cache must stay off"),
    ],
)
def test_what_the_user_must_change_is_one_message(word: str, message: str, tmp_path: Path) -> None:
    done = run(word, f"output.path={tmp_path}/hs")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "hs/shards").exists()


def test_an_engine_that_cannot_start_ends_the_run_with_its_own_words(
    tiny_random: Path, source: Path, tmp_path: Path
) -> None:
    """After one load of the model; weights that do not have the shapes of config.json are SGLang's to find."""
    model = shutil.copytree(tiny_random, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    done = run(*words(source, tmp_path / "hs"), "layers=[3]", f"model.path={model}", "capture.prove=never", **ENV)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "SGLang's scheduler of rank 0 raised while it started: AssertionError: " in done.stderr, said
    assert said.count("Traceback") == 1, said
    assert left_behind() == []


def test_an_output_of_another_configuration_is_refused(output: Path, source: Path) -> None:
    done = run(*words(source, output), "layers=[3,8,20]")
    assert done.returncode == 2
    assert "made by another configuration" in done.stderr
    assert "layers = [3, 8, 20] (was [3, 7, 20])" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_sglang_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "sglang-9.9.9.dist-info").mkdir()
    (tmp_path / "sglang-9.9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    done = run(f"output.path={tmp_path}/hs", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "sglang = 9.9.9: hs_ray has patches for 0.5.17, 0.5.23" in done.stderr
    assert "Traceback" not in done.stderr
