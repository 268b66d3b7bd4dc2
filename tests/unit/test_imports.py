"""Imports go one way, and nobody pays for what he does not use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hs_ray"
# A module may import those before it, never one after it. ARCHITECTURE.md says what each is for.
ORDER = [
    "errors", "schema", "config_schema", "config_checks", "config_docs", "storage", "config", "lease", "weights",
    "builtin_models", "model", "inputs", "plan", "engine", "prove", "writer", "extract", "manifest", "report",
    "pipeline", "reader", "verify", "describe", "export", "bench", "submit",
]  # fmt: skip
# What a module must not bring in when it is imported, even through others.
STORE = ["s3fs", "botocore"]  # for those who use one
LIGHT = {
    "schema": ["torch", "ray", "sglang", "hydra", "transformers"],
    "config": ["torch", "ray", "sglang", "transformers"],
    "storage": ["torch", "ray", "sglang", "hydra", *STORE],
    "model": ["torch", "ray", "sglang", "transformers"],
    "manifest": ["ray", "sglang", "hydra"],
    "inputs": ["torch", "ray", "sglang", "transformers", *STORE],
    "pipeline": ["sglang", *STORE],
    "bench": ["sglang", *STORE],
    "reader": ["ray", "sglang", "hydra", "omegaconf", "transformers", *STORE],
    "verify": ["ray", "sglang"],
    "describe": ["ray", "sglang"],
    "export": ["ray", "sglang"],
}


def modules() -> dict[str, list[Path]]:
    """Top-level module or subpackage of hs_ray -> its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found.setdefault(name, []).append(path)
    return found


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, inside functions too; relative ones are spelt out."""
    package = list(path.relative_to(PACKAGE.parent).parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


ALL = [(name, path) for name, paths in modules().items() for path in paths]
IDS = [str(path.relative_to(PACKAGE)) for _, path in ALL]


def test_every_module_has_its_place() -> None:
    assert set(modules()) - set(ORDER) - {"demo"} == set()


@pytest.mark.parametrize(("name", "path"), ALL, ids=IDS)
def test_imports_go_one_way(name: str, path: Path) -> None:
    wrong = [
        f"{path.name}:{line} imports {target}"
        for line, target in imports(path)
        if target.startswith("hs_ray.")
        and target.split(".")[1] in ORDER
        and ORDER.index(target.split(".")[1]) > ORDER.index(name)
    ]
    assert wrong == []


@pytest.mark.parametrize(("name", "path"), ALL, ids=IDS)
def test_one_importer_of_sglang_and_one_of_ray_data(name: str, path: Path) -> None:
    targets = [f"{target}." for _, target in imports(path)]
    assert name == "engine" or not any(target.startswith(("sglang.", "sgl_kernel.")) for target in targets)
    assert name == "pipeline" or not any(target.startswith("ray.data.") for target in targets)


@pytest.mark.parametrize("name", LIGHT)
def test_importing_stays_light(name: str) -> None:
    if name not in modules():
        pytest.skip(f"hs_ray.{name} does not exist")
    code = f"import hs_ray.{name}, sys; print([m for m in {LIGHT[name]!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_package_imports_nothing() -> None:
    assert imports(PACKAGE / "__init__.py") == []
