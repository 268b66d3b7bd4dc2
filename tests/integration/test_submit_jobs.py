"""The job as people submit it: a real cluster on loopback, the real CLI, the dashboard's API, the metrics, the log.

Once without authentication and once with a token. hs_ray comes with the working directory alone.
"""

import json
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray_head import SECRETS, RayHead, copy_of_clone, python_without_hs_ray

from hs_ray.config import data_path

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

LIMIT_S = 1500.0  # engines start slowly on a busy machine
METRICS_S = 120.0
ROUNDS = 5
EXPECTED = Path(__file__).parent / "expected"
BROKEN = ['{"id": "no-messages"}', "not json"]


@dataclass
class Submitted:
    """What was seen of one job while it ran, and after."""

    output: Path
    cli_code: int
    log: str
    info: dict[str, Any]
    datasets: list[dict[str, Any]] = field(default_factory=list)
    metrics_before: Counter[str] = field(default_factory=Counter)

    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads((self.output / "manifest.json").read_text())
        return manifest


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hsr-", dir="/tmp") as folder:  # short: Ray puts sockets below it
        yield Path(folder)


@pytest.fixture(scope="module", params=["disabled", "token"])
def head(request: pytest.FixtureRequest, place: Path) -> Iterator[RayHead]:
    python = place / "venv/bin/python"
    if not python.exists():
        python_without_hs_ray(place / "venv")
        copy_of_clone(place / "clone")
    cluster = RayHead(python, place / request.param, request.param)
    yield cluster
    cluster.close()


def submit(head: RayHead, place: Path, name: str, *words: str) -> Submitted:
    """`ray job submit --working-dir .` in the clone, watched until it ends."""
    output = place / f"{name}-{head.temp.name}"
    job = ["python", "jobs/extract.py", "model=tiny_random", f"output.path={output}", *words]
    command = [
        *head.ray,
        "job",
        "submit",
        "--address",
        head.address,
        "--submission-id",
        name,
        "--working-dir",
        ".",
        "--",
    ]
    process = wait_for_agent(head, place, [*command, *job], name)
    seen = Submitted(output, -1, "", {}, metrics_before=head.scrape())
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < deadline, head.get(f"/api/jobs/{name}/logs")["logs"][-5000:]
        info = head.get(f"/api/jobs/{name}")
        if info.get("job_id"):
            seen.datasets += head.get(f"/api/data/datasets/{info['job_id']}")["datasets"]
        time.sleep(0.7)
    seen.cli_code, seen.info = process.returncode, head.get(f"/api/jobs/{name}")
    seen.log = head.get(f"/api/jobs/{name}/logs")["logs"]
    return seen


def wait_for_agent(head: RayHead, place: Path, command: list[str], name: str) -> subprocess.Popen[bytes]:
    """In its first seconds a cluster has no agent, and the CLI gives up: what jobs/submit.py is for."""
    for _ in range(20):
        process = subprocess.Popen(command, cwd=place / "clone", env=head.env)
        while process.poll() is None:
            try:
                head.get(f"/api/jobs/{name}")
                return process
            except OSError:
                time.sleep(0.5)
    raise AssertionError("the cluster never took the job")


# --- the log as people read it ---

LINES = re.compile(r"hs_ray: |  engine |  slowest: |(?:model|layers|lines|tokens|output|time|GPUs)  +| {11}|\S+ = ")
PROGRESS = re.compile(r"hs_ray: [\d,]+/[\d,]+ units")
NUMBERS = [
    (r"\b[\w.-]+-\d+ \((?:N|\d).*?\): (\w)", r"ENGINE (TIME): \1"),
    (r"engine [\w.-]+-\d+:", "engine ENGINE:"),
    (r"/tmp/[^\s,;]+?(?=/_|[\s,;]|$)", "OUT"),
    (r"\b[\d.,]+ (?:B|kB|MB|GB|TB)\b", "SIZE"),
    (r"\b\d+ h \d+ min|\b[\d.]+ (?:s|min)\b", "TIME"),
    (r" #+$", " BAR"),
    (r"(?<![\w.])[\d,]*\d(?:\.\d+)?(?![\w.]*\w)", "N"),
]


def normalised(log: str) -> str:
    """The driver's lines with names, sizes, times and numbers replaced; of equal lines one."""
    kept: list[str] = []
    for line in log.splitlines():
        if not LINES.match(line) or line.startswith("hs_ray: planning: ") and "lines" in line:
            continue  # of other processes; and lines that come only when planning takes long
        if PROGRESS.match(line):
            if " tok/s" not in line:
                continue  # how long a start takes, and so what is said of it, is the machine's affair
            line = re.sub(r"(engines up).*", r"\1", line)
        for pattern, name in NUMBERS:
            line = re.sub(pattern, name, line)
        line = re.sub(
            r"N tok/s  SIZE/s  ETA \w+", "N tok/s  SIZE/s  ETA TIME", re.sub(r" {12,}| {2,}(?=N #|BAR)", " ", line)
        )
        line = re.sub(r"^ +<= +N tokens +N BAR", "           <= N tokens N BAR", line)
        if line not in kept:
            kept.append(line)
    return "\n".join(kept) + "\n"


def check_log(name: str, log: str) -> None:
    """Against tests/integration/expected/NAME.txt."""
    assert normalised(log) == (EXPECTED / f"{name}.txt").read_text(), f"the log was:\n{log}"


# --- tests: one engine start each; each on both kinds of cluster would be twice the time ---


def repeated_demo(path: Path) -> Path:
    """The demo's samples several times over: the dashboard looks at a run every few seconds, so it must last some."""
    samples = [json.loads(line) for line in (data_path("demo") / "samples.jsonl").read_text().splitlines()]
    lines = [json.dumps(sample | {"id": f"{sample['id']}-{n}"}) for n in range(ROUNDS) for sample in samples]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_good_run_is_seen_while_it_runs(head: RayHead, place: Path) -> None:
    path = repeated_demo(place / "good.jsonl")
    words = ["output.shard_bytes=2MB", "layers=[2,4,5]", "cluster.progress_seconds=2"]
    run = submit(head, place, "good", f"input.path={path}", *words)
    assert run.cli_code == 0, run.log
    manifest = run.manifest()
    counts = manifest["counts"]
    assert (
        manifest["complete"]
        and counts["committed"] == 79 * ROUNDS
        and [layer["id"] for layer in manifest["layers"]] == [2, 4, 5]
    )
    check_log("good", run.log)
    check_dashboard(run, counts["units"])
    check_metrics(head, run, counts)
    check_first_line(run)
    check_nothing_secret(head, run)
    assert (run.output / "_run/report.html").read_text().startswith("<!doctype html>")


def test_a_run_with_rejects_and_one_that_cannot_start(head: RayHead, place: Path) -> None:
    if head.env["RAY_AUTH_MODE"] == "token":
        pytest.skip("the same with a token")
    lines = (data_path("demo") / "samples.jsonl").read_text().splitlines()[:20] + BROKEN
    (place / "in.jsonl").write_text("\n".join(lines) + "\n")
    some = [f"input.path={place}/in.jsonl", "input.max_rejected=0.2", "output.shard_bytes=500kB"]
    run = submit(head, place, "rejects", *some, "cluster.progress_seconds=2")
    assert (run.cli_code, run.info["driver_exit_code"]) == (1, 3), run.log  # the CLI knows only 0 and 1
    check_log("rejects", run.log)
    assert run.manifest()["counts"]["rejected"] == 2
    check_metrics(head, run, run.manifest()["counts"])
    wrong = submit(head, place, "cannot-start", "layers=[3,99]", "max_seq_len=100000")
    assert (wrong.cli_code, wrong.info["driver_exit_code"]) == (1, 2)
    check_log("cannot-start", wrong.log)
    assert not wrong.output.exists()


def check_dashboard(run: Submitted, units: int) -> None:
    """The dataset is named, its operator too, and its progress moved: one row is one unit."""
    assert all(dataset["dataset"].startswith("hs_ray_extract") for dataset in run.datasets)
    progress = [dataset["progress"] for dataset in run.datasets]
    assert progress == sorted(progress) and len(set(progress)) >= 3, progress
    assert {dataset["total"] for dataset in run.datasets} - {None, 0} == {units}  # not known at first
    operators = {operator["operator"] for dataset in run.datasets for operator in dataset["operators"]}
    assert any("HiddenStateExtractor" in name for name in operators), operators


def check_metrics(head: RayHead, run: Submitted, counts: dict[str, Any]) -> None:
    """Their totals are the manifest's. Workers report every few seconds, the node's agent when it can."""
    expected = {
        "tokens": counts["tokens"],
        "samples": counts["committed"],
        "bytes_written": counts["bytes"],
        "rejected": counts["rejected"] + counts["failed"],
    }
    deadline = time.monotonic() + METRICS_S
    while True:
        now = head.scrape()
        seen = {name: now[f"ray_hs_{name}_total"] - run.metrics_before[f"ray_hs_{name}_total"] for name in expected}
        if seen == expected or time.monotonic() > deadline:
            break
        time.sleep(3)
    assert seen == expected
    assert now["ray_hs_engine_busy_seconds_total"] > 0


def check_first_line(run: Submitted) -> None:
    """Loading is shown as such, long before the first unit."""
    lines = [line for line in run.log.splitlines() if line.startswith("hs_ray: ")]
    assert lines[0].startswith("hs_ray: model ")
    assert any("loading the model" in line for line in lines)


def check_nothing_secret(head: RayHead, run: Submitted) -> None:
    """The cluster's environment holds secrets; neither the output nor the log does."""
    written = [run.log.encode(), *(path.read_bytes() for path in run.output.rglob("*") if path.is_file())]
    for secret in (*SECRETS.values(), head.token):
        assert not [content[:200] for content in written if secret.encode() in content]


def test_the_driver_is_killed_twice_and_submitted_again(head: RayHead, place: Path) -> None:
    """jobs/submit.py goes on where the driver died, redoes nothing, and ends with the job's exit code."""
    if head.env["RAY_AUTH_MODE"] == "disabled":
        pytest.skip("the same without a token")
    output = place / "killed"
    env = {name: value for name, value in head.env.items() if name != "RAY_AUTH_MODE"}  # it asks the cluster
    job = ["model=tiny_random", f"output.path={output}", "output.shard_bytes=250kB", "cluster.progress_seconds=2"]
    command = [str(head.python), "jobs/submit.py", "--address", head.address, *job]
    process = subprocess.Popen(command, cwd=place / "clone", env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT_S
    committed: dict[Path, bytes] = {}
    for _ in range(2):
        enough = len(committed) + 4
        while len(list(output.glob("_run/done/*.json"))) < enough:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)  # files of another process: nothing tells of them
        lease = json.loads(max(output.glob("_run/leases/*.json")).read_text())
        subprocess.run(["kill", "-9", str(lease["pid"])], check=True)
        committed = {path: path.read_bytes() for path in output.glob("_run/done/*.json")}
    log, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, log
    assert len(re.findall(r"submit: the job ended with code 137, \d+ units committed by it", log)) == 2
    assert len(re.findall(r"hs_ray: resuming: \d+ of \d+ units are committed", log)) == 2
    assert {path: path.read_bytes() for path in committed} == committed
    assert json.loads((output / "manifest.json").read_text())["complete"]
