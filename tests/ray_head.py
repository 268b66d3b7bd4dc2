"""A Ray cluster of one node on loopback, as `ray start --head` gives it, on ports of its own; and a copy of the clone.

hs_ray is not installed there: what a job imports came with its working directory.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections import Counter
from pathlib import Path
from typing import Any

import ray

ROOT = Path(__file__).parents[1]
UPLOADED = ("conf", "hs_ray", "jobs", "patches", "pyproject.toml", ".gitignore", ".rayignore")
SECRETS = {"AWS_SECRET_ACCESS_KEY": "planted-aws-7c1f9e", "HF_TOKEN": "planted-hf-51d0a8"}  # of the whole cluster
START_S = 300.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def copy_of_clone(folder: Path) -> Path:
    """What `git clone` gives and a job needs, somewhere else."""
    for name in UPLOADED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


def python_without_hs_ray(folder: Path) -> Path:
    """A virtual environment that sees the packages of this one; an editable install is not among them."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    (packages / "all.pth").write_text(str(Path(ray.__file__).parents[1]) + "\n")
    python = folder / "bin/python"
    done = subprocess.run([python, "-c", "import hs_ray"], cwd="/", capture_output=True, text=True, check=False)
    assert "No module named 'hs_ray'" in done.stderr, "hs_ray is installed among the packages themselves"
    return python


class RayHead:
    """auth: `disabled` or `token`. Ends with `close`; the session's folder is `temp`."""

    def __init__(self, python: Path, temp: Path, auth: str):
        self.python, self.temp, self.token = python, temp, "planted-ray-" + "0" * 24
        port, self.dashboard, self.metrics, *others = free_ports(7)
        self.address = f"http://127.0.0.1:{self.dashboard}"
        hidden = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONPATH"}
        self.env = {name: value for name, value in os.environ.items() if name not in hidden} | {
            "RAY_AUTH_MODE": auth,
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        }
        if auth == "token":
            self.env["RAY_AUTH_TOKEN"] = self.token
        options = {
            "port": port, "dashboard-host": "127.0.0.1", "dashboard-port": self.dashboard, "num-cpus": 4,
            "metrics-export-port": self.metrics, "object-store-memory": 200_000_000, "temp-dir": temp,
            "dashboard-agent-listen-port": others[0], "dashboard-agent-grpc-port": others[1],
            "ray-client-server-port": others[2], "runtime-env-agent-port": others[3],
        }  # fmt: skip
        command = [*self.ray, "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())]
        self._log = (temp.parent / f"{temp.name}.log").open("w")
        self._process = subprocess.Popen(
            command, env=self.env | SECRETS, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                self.get("/api/version")
                return
            except OSError:
                assert self._process.poll() is None, Path(self._log.name).read_text()
                time.sleep(0.5)
        raise AssertionError(Path(self._log.name).read_text())

    @property
    def ray(self) -> list[str]:
        return [str(self.python), "-m", "ray.scripts.scripts"]

    def get(self, path: str) -> Any:
        """JSON of the dashboard."""
        request = urllib.request.Request(self.address + path)
        if self.env["RAY_AUTH_MODE"] == "token":
            request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def scrape(self) -> Counter[str]:
        """Sums of our metrics over all engines, at the node's metrics port; none before its agent is up."""
        sums: Counter[str] = Counter()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return sums
        for line in lines:
            if line.startswith("ray_hs_"):
                sums[line.split("{")[0]] += float(line.rsplit(" ", 1)[1])  # type: ignore[assignment]
        return sums

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()


if __name__ == "__main__":  # python tests/ray_head.py FOLDER MODE: by hand; ends with Ctrl-C
    base = Path(sys.argv[1])
    head = RayHead(python_without_hs_ray(base / "venv"), base / "ray", sys.argv[2])
    print(f"RAY_ADDRESS={head.address} RAY_AUTH_MODE={sys.argv[2]} PATH={head.python.parent}:$PATH")
    try:
        signal.pause()
    finally:
        head.close()
