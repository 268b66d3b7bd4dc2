"""hs_ray.submit: which ends are worth another attempt, patience, a log that is read twice and printed once."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hs_ray.errors import ConfigError
from hs_ray.submit.again import Run, run_until_done
from hs_ray.submit.cli import make_run, parse
from hs_ray.submit.client import (
    ClusterGoneError,
    Ended,
    NotThereYetError,
    _Log,
    auth_mode,
    job_server,
    with_patience,
)

ROOT = Path(__file__).parents[2]
KILLED = Ended("FAILED", -9)
GONE = Ended("LOST", None, "the head was replaced")
DONE = Ended("SUCCEEDED", 0)


class Cluster:
    """Ends attempt after attempt as told: (units committed, how it ended)."""

    def __init__(self, output: Path, *attempts: tuple[int, Ended], refusals: int = 0):
        self.done, self.attempts, self.refusals = output / "_run/done", list(attempts), refusals
        self.submitted: list[str] = []

    def submit(self, submission_id: str, entrypoint: str, runtime_env: dict[str, Any]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise NotThereYetError("No available agent")
        self.submitted.append(submission_id)

    def follow(self, submission_id: str, line: Callable[[str], None], wait_s: float, say: Any) -> Ended:
        units, ended = self.attempts.pop(0)
        self.done.mkdir(parents=True, exist_ok=True)
        for _ in range(units):
            (self.done / f"unit-{len(list(self.done.iterdir())):06d}.json").touch()
        return ended


def run(cluster: Any, output: str, attempts: int = 5) -> tuple[int, list[str], list[float]]:
    said: list[str] = []
    slept: list[float] = []
    job = Run("job", "python jobs/extract.py", {}, output, {}, attempts, wait_s=100.0, lease_s=60.0)
    code = run_until_done(cluster, job, echo=lambda _: None, say=said.append, sleep=slept.append)
    return code, said, slept


def test_again_while_each_attempt_commits(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (3, KILLED), (1, KILLED), (6, DONE))
    code, _, slept = run(cluster, str(tmp_path))
    assert (code, cluster.submitted, slept) == (0, ["job-1", "job-2", "job-3"], [5.0, 5.0])


@pytest.mark.parametrize("code", [2, 3])
def test_never_again_after_2_and_3(tmp_path: Path, code: int) -> None:
    cluster = Cluster(tmp_path, (9, Ended("FAILED", code)))
    assert run(cluster, str(tmp_path))[0] == code
    assert cluster.submitted == ["job-1"]


def test_not_again_without_progress(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (2, KILLED), (0, KILLED))
    code, said, _ = run(cluster, str(tmp_path))
    assert (code, cluster.submitted) == (137, ["job-1", "job-2"])
    assert said[-1] == "it committed nothing, so another attempt would not either; not submitted again"


def test_a_lost_head_is_no_fault_of_the_job_and_its_lease_runs_out(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (0, GONE), (4, DONE))
    code, _, slept = run(cluster, str(tmp_path))
    assert (code, len(cluster.submitted), slept) == (0, 2, [60.0])


def test_the_cap(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, *[(1, Ended("FAILED", 1))] * 3)
    code, said, _ = run(cluster, str(tmp_path), attempts=3)
    assert (code, len(cluster.submitted)) == (1, 3) and "3 attempts" in said[-1]


def test_a_job_that_never_began_is_not_tried_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (0, Ended("FAILED", None, "no package hydro-core", "RUNTIME_ENV_SETUP_FAILURE")))
    code, said, _ = run(cluster, str(tmp_path))
    assert (code, len(cluster.submitted), said[-1]) == (2, 1, "the job never began: no package hydro-core")


def test_stopped_is_final(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (1, Ended("STOPPED", None)))
    code, said, _ = run(cluster, str(tmp_path))
    assert (code, len(cluster.submitted)) == (1, 1) and "stopped" in said[-1]


def test_progress_is_known_from_the_log_where_the_output_is_out_of_sight() -> None:
    class Far(Cluster):
        def follow(self, submission_id: str, line: Callable[[str], None], wait_s: float, say: Any) -> Ended:
            lines, ended = self.attempts.pop(0)
            for text in lines:  # type: ignore[attr-defined]
                line(text)
            return ended

    first = ["hs_ray: 0/2,000 units  0/9 samples", "hs_ray: 1,020/2,000 units  3/9 samples"]
    second = ["hs_ray: resuming: 1,022 of 2,000 units are committed and are not done again"]
    cluster = Far(Path("/nowhere"), (first, KILLED), (second, KILLED), (second, KILLED))  # type: ignore[arg-type]
    assert run(cluster, "/no/such/disk")[0] == 137
    assert len(cluster.submitted) == 3  # the second found two units more, the third none


def test_an_attempt_that_begins_with_less_has_made_progress(tmp_path: Path) -> None:
    """A node's disk is gone, and its units with it: what counts is what was done since."""

    class Shrunk(Cluster):
        def follow(self, submission_id: str, line: Callable[[str], None], wait_s: float, say: Any) -> Ended:
            if len(self.submitted) == 2:
                for marker in list(self.done.iterdir())[1:]:
                    marker.unlink()
                line("hs_ray: resuming: 1 of 20 units are committed and are not done again")
                line("hs_ray: 3/20 units  3/20 samples")
            return super().follow(submission_id, line, wait_s, say)

    cluster = Shrunk(tmp_path, (9, KILLED), (2, KILLED), (17, DONE))
    assert run(cluster, str(tmp_path))[0] == 0
    assert len(cluster.submitted) == 3


def test_waits_for_the_agent(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (1, DONE), refusals=3)
    code, said, slept = run(cluster, str(tmp_path))
    assert (code, slept) == (0, [1.0, 2.0, 4.0])
    assert said[0] == "waiting for the cluster: No available agent"


def test_patience_ends() -> None:
    def never() -> None:
        raise NotThereYetError("nobody there")

    with pytest.raises(ClusterGoneError, match="nobody there; waited 0 s"):
        with_patience(never, 0.0, lambda _: None)


def test_a_log_read_again_from_its_start_is_printed_once() -> None:
    lines: list[str] = []
    log = _Log(lines.append)
    log.add("one\ntw")
    log.restart()
    log.add("one\n")
    log.add("two\nthree\nfo")
    log.restart()
    log.add("one\ntwo\nthree\nfour")
    log.finish()
    assert lines == ["one", "two", "three", "four"]


def test_arguments_pass_through_as_they_are() -> None:
    options = parse(
        ["--attempts", "3", "model=tiny_random", "layers=[2,4]", "input.path=/d/a b.jsonl", "output.path=/o"]
    )
    made = make_run(options, ROOT)
    assert made.entrypoint == (
        "python jobs/extract.py model=tiny_random 'layers=[2,4]' 'input.path=/d/a b.jsonl' output.path=/o"
    )
    assert (made.output, made.attempts, made.runtime_env) == ("/o", 3, {"working_dir": str(ROOT)})
    installed = make_run(options, None)
    assert installed.entrypoint.startswith("python -m hs_ray extract ") and installed.runtime_env == {}


def test_runtime_env_file_is_merged_and_pinned_as_tested() -> None:
    made = make_run(parse(["--runtime-env", str(ROOT / "jobs/runtime_env.yaml"), "output.path=/o"]), ROOT)
    assert made.runtime_env["working_dir"] == str(ROOT)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(made.runtime_env["pip"]["packages"]) <= set(pinned)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["output.path=/o", "laiers=[1]"], "laiers = [1]: no such key"),
        (["output.path=out"], "output.path = out: an absolute path or s3://bucket/prefix"),
        ([], "output.path = null: an absolute path"),
        (["output.path=/o", "--attempts", "0"], "--attempts = 0: 1 or more"),
        (["output.path=/o", "--runtime-env", "nothing.yaml"], "--runtime-env = nothing.yaml: no such file"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_submitted(args: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_run(parse(args), ROOT)
    assert str(caught.value).startswith(text)


def test_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert job_server(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265/")
    assert job_server(None) == "http://head:8265"
    assert job_server("https://other") == "https://other"
    with pytest.raises(ConfigError, match="the dashboard's address"):
        job_server("head:6379")


@pytest.fixture
def dashboard() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"authentication_mode": "token"}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_the_cluster_says_whether_it_wants_a_token(dashboard: HTTPServer) -> None:
    assert auth_mode(f"http://127.0.0.1:{dashboard.server_port}") == "token"
    with pytest.raises(NotThereYetError, match="does not answer"):
        auth_mode("http://127.0.0.1:9")


def test_little_is_uploaded() -> None:
    """What a job needs goes up, and nothing that is large; the same rules as Ray's own."""
    from ray._private.runtime_env.packaging import _dir_travel

    names: list[str] = []
    total = 0

    def visit(path: Path) -> None:
        nonlocal total
        if path.is_file():
            names.append(str(path.relative_to(ROOT)))
            total += path.stat().st_size

    def skipped(path: Path) -> bool:
        return bool({".git", ".venv", "venv", "__pycache__"} & set(path.parts))

    _dir_travel(ROOT, [skipped], visit, include_gitignore=True)
    assert total < 3_000_000
    needed = {"jobs/extract.py", "conf/extract.yaml", "hs_ray/demo/samples.jsonl", "patches/sglang/v0.5.23.patch"}
    assert needed <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "outputs/", ".dev/"))]
