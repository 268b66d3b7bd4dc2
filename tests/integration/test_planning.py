"""Planning through real Ray tasks, and the job's own answers before any engine is started."""

import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from kimi import write_kimi

from hs_ray.bench import corpus
from hs_ray.config import ExtractJob
from hs_ray.errors import InputError
from hs_ray.inputs import Source, list_sources, split_sources
from hs_ray.pipeline.planning import read_tables
from hs_ray.plan import PlanSummary, build_plan, resolve
from hs_ray.storage import open_storage

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Tokens and chats in three files of unlike sizes, a bad line here and there, an id that comes twice."""
    folder = tmp_path_factory.mktemp("input")
    rng = random.Random(0)
    corpus.write_tokens(folder / "b.jsonl", [rng.randrange(2, 400) for _ in range(600)], 49152)
    corpus.write_tokens(folder / "c.jsonl", [rng.randrange(2, 400) for _ in range(90)], 49152, seed=1)  # ids of b
    corpus.write_chats(folder / "a.jsonl", 60)
    with (folder / "b.jsonl").open("ab") as file:
        file.write(b'{"input_ids": [1, 2]}\n\n{"input_ids": [-1]}\nbad\n{"input_ids": [3]}')
    return [str(path) for path in sorted(folder.iterdir())]


def plan(paths: list[str], output: Path, cpus: int, chunk_bytes: int = 50_000) -> tuple[PlanSummary, dict[str, str]]:
    """Through Ray, with so many tasks at once -> (summary, {file of the plan: sha256})."""
    job = ExtractJob()
    job.model.path, job.input.path, job.output.path = "builtin:tiny_random", list(paths), str(output)
    job.output.shard_bytes = "5MB"
    resolved = resolve(job)
    chunks = split_sources(list_sources(job.input), chunk_bytes)
    assert len(chunks) > 4 * cpus
    tables = read_tables(chunks, resolved.tokenize_settings, cpus)
    summary = build_plan(open_storage(str(output)), tables, resolved)
    files = {str(p.relative_to(output)): hashlib.sha256(p.read_bytes()).hexdigest() for p in output.rglob("*.parquet")}
    return summary, files


def test_the_same_plan_whatever_the_workers_and_the_order(ray_cluster: None, inputs: list[str], tmp_path: Path) -> None:
    summary, files = plan(inputs, tmp_path / "one", cpus=1)
    assert summary.lines == 60 + 605 + 90 == summary.samples + summary.rejected + summary.blank
    assert summary.rejects_by_code == {"duplicate_id": 90, "malformed_json": 1, "token_out_of_range": 1}
    assert summary.units > 10 and len(files) >= 2
    assert plan(inputs[::-1], tmp_path / "four", cpus=4) == (summary, files)
    assert plan([inputs[1], inputs[2], inputs[0]], tmp_path / "borders", cpus=4, chunk_bytes=33_333) == (summary, files)


def test_a_damaged_file_is_one_message_from_a_task(ray_cluster: None, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl.zst"
    bad.write_bytes(b"not zstd")
    chunks = split_sources([Source(str(bad), bad.name, bad.stat().st_size, "tokens", "lines")])
    with pytest.raises(InputError, match=r"bad\.jsonl\.zst: cannot be read") as caught:
        list(read_tables(chunks, resolve(ExtractJob(dry_run=True)).tokenize_settings, 1))
    assert "Traceback" not in str(caught.value) and "ray::" not in str(caught.value)


def test_a_limit_frees_the_workers(ray_cluster: None, tmp_path: Path) -> None:
    """What reads ahead of a limit ends: it would hold its CPUs from the engines."""
    corpus.write_tokens(tmp_path / "long.jsonl", [2000] * 4000, 49152)
    job = ExtractJob(dry_run=True)
    job.input.path = str(tmp_path / "long.jsonl")
    tables = read_tables(split_sources(list_sources(job.input), 2**20), resolve(job).tokenize_settings, 4)
    next(tables)
    tables.close()
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources()["CPU"] == 4


def extract(*overrides: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """jobs/extract.py on a Ray cluster of its own -> (what it said, user seconds of it and its children)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, str(ROOT / "jobs/extract.py"), "cluster.address=local", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"COLUMNS": "200"})
    return done, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def test_too_many_rejects_stop_the_job_before_an_engine(tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "input_ids": [1, 2, 3]}) for i in range(96)]
    lines += ["bad", '{"input_ids": [-5]}', "{}", '{"input_ids": [1], "loss_mask": [1, 1]}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    done, seconds = extract("model=tiny_random", f"input.path={tmp_path}/in.jsonl", f"output.path={tmp_path}/out")
    assert done.returncode == 2, done.stderr
    assert "input.max_rejected = 0.01: 4 of 100 lines (4.00%) are unusable" in done.stderr
    examples = [line.strip() for line in done.stderr.splitlines() if line.startswith("  in.jsonl, line ")]
    assert [line.split(":")[:2] for line in examples] == [
        ["in.jsonl, line 96", " malformed_json"],
        ["in.jsonl, line 97", " token_out_of_range"],
        ["in.jsonl, line 98", " missing_key"],
    ]
    assert "Traceback" not in done.stderr and "engine" not in done.stdout
    assert not (tmp_path / "out/_run/run.json").exists() and not (tmp_path / "out/_run/attempts").exists()
    assert seconds < 20


def test_a_dry_run_of_kimi_needs_no_weights_and_refuses_after_the_estimate(tmp_path: Path) -> None:
    """A hundredth of the run in docs/planning.md."""
    corpus.write_tokens(tmp_path / "in.jsonl", corpus.chat_lengths(373, 878_000, 8192).tolist(), 163_840)
    done, _ = extract(
        "experiment=kimi_k25_8gpu",
        "dry_run=true",
        f"model.path={write_kimi(tmp_path / 'kimi')}",
        f"input.path={tmp_path}/in.jsonl",
        f"output.path={tmp_path}/out",
        "output.min_free_bytes=1000TB",
        "cluster.tokens_per_second=20000",
    )
    for part in (
        "layers     3 (output of layer 2), 31 (output of layer 30), 59 (output of layer 58); final: final_pre_norm",
        "lines      373 = 373 samples + 0 rejected + 0 blank",
        "tokens     878,000 (60% learned)",
        "output     50.4 GB in 47 shards: 57,344 bytes of states a token; ",
        "time       44 s at 20,000 tokens/s an engine, one engine",
        "GPUs       8 an engine, as many engines as fit",
    ):
        assert part in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2 and "needs 1000.05 TB" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
