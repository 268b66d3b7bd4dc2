"""Patches fit the published sources exactly, or refuse, with file and hunk."""

import subprocess
import sys
from pathlib import Path

import pytest

from hs_ray.engine import patching
from hs_ray.engine.patching import Patch
from hs_ray.errors import PatchError, UnsupportedError

TARGETS = [
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.logits_processor",
    "sglang.srt.managers.tp_worker",
]


def source_of(module: str) -> tuple[str, str]:
    path = patching.sglang_root().joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text(), str(path)


@pytest.mark.parametrize("release", patching.known_releases())
def test_a_patch_changes_three_modules_and_only_calls_into_capture(release: str) -> None:
    assert Patch.for_release(release).modules == TARGETS
    text = (patching.patch_folder() / f"v{release}.patch").read_text()
    added = [line[1:].strip() for line in text.splitlines() if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in text.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert removed == []
    assert all("hs_capture" in line or not line for line in added)
    assert [line for line in added if "(" in line] == [
        "hs_capture.configure(self)",
        "hs_capture.collect(aux_hidden_states, hidden_states)",
        "hs_capture.begin(batch)",
        "hs_capture.finish()",
    ]


def test_the_patch_fits_the_installed_release() -> None:
    patch = patching.check_installed()
    source, origin = source_of(TARGETS[2])
    assert patch.apply(TARGETS[2], source, origin).count("hs_capture.begin(batch)") == 1


@pytest.mark.parametrize("module", TARGETS)
def test_a_changed_context_names_file_and_hunk(module: str) -> None:
    release = patching.installed_release()
    text = (patching.patch_folder() / f"v{release}.patch").read_text()
    head, _, body = text.partition(module.replace(".", "/") + ".py")
    doctored = Patch(release, head + module.replace(".", "/") + ".py" + body.replace("\n ", "\n x", 3))
    source, origin = source_of(module)
    with pytest.raises(PatchError, match=rf"v{release}.patch: hunk 1 does not fit .*{module.split('.')[-1]}.py"):
        doctored.apply(module, source, origin)


def test_a_moved_source_is_refused_without_fuzz() -> None:
    source, origin = source_of(TARGETS[0])
    with pytest.raises(PatchError, match="hunk 1"):
        patching.check_installed().apply(TARGETS[0], "\n" + source, origin)


def test_an_unknown_release_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.9.9")
    with pytest.raises(UnsupportedError, match=r"sglang = 0\.9\.9: hs_ray has patches for 0\.5\.17, 0\.5\.23"):
        patching.installed_release()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


FAKE = """
import sys
from hs_ray.engine.patching import Patch, is_patched
PATCH = '''diff --git a/fakepkg/mod.py b/fakepkg/mod.py
--- a/fakepkg/mod.py
+++ b/fakepkg/mod.py
@@ -1,3 +1,4 @@
 def f():
+    raise ValueError("patched line")
     x = 1
     return x
'''
patch = Patch("1.0", PATCH)
"""


@pytest.fixture
def fakepkg(tmp_path: Path) -> str:
    (tmp_path / "fakepkg").mkdir()
    (tmp_path / "fakepkg/__init__.py").touch()
    (tmp_path / "fakepkg/mod.py").write_text("def f():\n    x = 1\n    return x\n")
    return str(tmp_path)


def test_a_module_is_patched_as_it_is_imported_and_tracebacks_show_it(fakepkg: str) -> None:
    code = FAKE + (
        "import fakepkg.mod as first; del sys.modules['fakepkg.mod']\n"  # leaves a .pyc of the unpatched file
        "patch.install(); import fakepkg.mod as m; patch.require_loaded(); assert is_patched(m)\n"
        "import linecache, traceback; linecache.clearcache()\n"
        "try: m.f()\nexcept ValueError: traceback.print_exc()"
    )
    done = run(code, PYTHONPATH=fakepkg)
    assert 'mod.py[patched]", line 2, in f' in done.stderr
    assert 'raise ValueError("patched line")' in done.stderr


def test_a_module_that_is_loaded_already_is_refused(fakepkg: str) -> None:
    done = run(FAKE + "import fakepkg.mod\npatch.install()", PYTHONPATH=fakepkg)
    assert "PatchError: fakepkg.mod was imported before hs_ray could patch it" in done.stderr


def test_a_module_that_runs_unpatched_is_found(fakepkg: str) -> None:
    done = run(FAKE + "import fakepkg.mod\npatch.require_loaded()", PYTHONPATH=fakepkg)
    assert "fakepkg.mod runs without patches/sglang/v1.0.patch" in done.stderr
