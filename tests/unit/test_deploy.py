"""What is handed to a cluster: the dashboard, the manifest, the image, and the commands of docs/cluster.md."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hs_ray.config import ExtractJob, load
from hs_ray.engine.patching import known_releases

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
BOARD = json.loads((ROOT / "jobs/grafana/hs_ray.json").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def metrics() -> set[str]:
    """As Ray exports those that are counted; tests/integration/test_submit_jobs.py scrapes them."""
    source = (ROOT / "hs_ray/pipeline/metrics.py").read_text()
    return {f"ray_{name}" for name in re.findall(r'counter\("(hs_\w+)"', source)}


def queries() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_plots_every_metric_and_no_other() -> None:
    assert len(metrics()) == 6
    assert {name for query in queries() for name in re.findall(r"ray_\w+", query)} == metrics()
    assert metrics() <= set(re.findall(r"ray_hs_\w+", PAGE))


def test_dashboard_is_well_formed() -> None:
    for query in queries():
        for left, right in ("()", "{}", "[]"):
            assert query.count(left) == query.count(right), query
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD["panels"]))) <= names
    cells = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(cell["x"] + cell["w"] <= 24 for cell in cells)


def commands() -> list[str]:
    """Every extraction on the page, with `\\`-ended lines joined."""
    text = PAGE.replace("\\\n", " ")
    return re.findall(r"(?:jobs/(?:extract|submit)\.py|hs_ray extract) ([^`\n#]*)", text)


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_are_accepted(command: str) -> None:
    words = [word for word in shlex.split(command) if "=" in word and not word.startswith("-")]
    load(ExtractJob, "extract", words)


def test_the_page_has_commands() -> None:
    assert sum("layers=" in command for command in commands()) >= 5


@pytest.fixture
def rayjob() -> Any:
    return OmegaConf.to_container(OmegaConf.load(ROOT / "jobs/kuberay/rayjob.yaml"))


def test_rayjob(rayjob: Any) -> None:
    spec = rayjob["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:4] == ["python", "-m", "hs_ray", "extract"]
    load(ExtractJob, "extract", words[4:])
    cluster = spec["rayClusterSpec"]
    assert f"ray[data,default]=={cluster['rayVersion']}" in (ROOT / "pyproject.toml").read_text()
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        literal = {entry["name"] for entry in container["env"] if "value" in entry}
        assert not [name for name in literal if re.search("SECRET|TOKEN|KEY", name)]  # those come from a Secret


def test_image_is_pinned_and_not_root() -> None:
    bases = re.findall(r"^(?:FROM|ARG BASE=)\s*(\S+)", DOCKERFILE, re.M)
    pinned = [base for base in bases if not base.startswith("$")]
    assert len(pinned) == 2 and all(re.search(r":v?\d+\.\d+\.\d+", base) for base in pinned)
    release = re.search(r"sglang:v(\d+\.\d+\.\d+)", DOCKERFILE)
    assert release is not None and release[1] in known_releases()
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.M) == ["1000"]
    for folder in ("conf", "hs_ray", "jobs", "patches"):
        assert f"COPY {folder} {folder}" in DOCKERFILE
