"""Applies `patches/sglang/v<release>.patch` in memory while SGLang's modules are imported.

What a reviewer reads in the patch is what runs: strict context, no fuzz, no offset. Nothing in
site-packages is changed. A release without a patch, or a source that the patch no longer fits, refuses to
start and says which file and hunk.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import whatthepatch
from whatthepatch.exceptions import HunkApplyException

from hs_ray.config import data_path
from hs_ray.errors import PatchError, UnsupportedError


def patch_folder() -> Path:
    return data_path("patches") / "sglang"


def known_releases() -> list[str]:
    return sorted(path.stem.removeprefix("v") for path in patch_folder().glob("v*.patch"))


def installed_release() -> str:
    """The installed SGLang's version, without importing it. Raises UnsupportedError."""
    known = ", ".join(known_releases())
    try:
        release = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(f"sglang is not installed: install one of {known}") from None
    if release not in known_releases():
        raise UnsupportedError(
            f"sglang = {release}: hs_ray has patches for {known}; install one of them "
            f"(patches/README.md says how to add a release)"
        )
    return release


def sglang_root() -> Path:
    """The folder that holds the `sglang` package, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(f"sglang is not importable: install one of {', '.join(known_releases())}")
    return Path(next(iter(spec.submodule_search_locations))).parent


class Patch:
    """One release's unified diff: which modules it changes, and their patched sources."""

    def __init__(self, release: str, text: str):
        self.release = release
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._diffs = {_module_name(diff.header.new_path): diff for diff in whatthepatch.parse_patch(text)}

    @classmethod
    def for_release(cls, release: str) -> "Patch":
        return cls(release, (patch_folder() / f"v{release}.patch").read_text())

    @property
    def modules(self) -> list[str]:
        return list(self._diffs)

    def apply(self, module: str, source: str, origin: str) -> str:
        """The patched source. Raises PatchError that names file and hunk."""
        diff = self._diffs[module]
        try:
            # A list, since str.splitlines would also split on form feeds and U+2028.
            lines: list[str] = whatthepatch.apply_diff(diff, source.split("\n"))
        except HunkApplyException as error:
            raise PatchError(
                f"patches/sglang/v{self.release}.patch: hunk {error.hunk} does not fit {origin}: {error}; "
                f"this SGLang is not the published {self.release}: install that release, or add a patch for yours"
            ) from error
        return "\n".join(lines)

    def check(self) -> None:
        """Try every hunk on the installed sources, without importing sglang. Raises PatchError."""
        root = sglang_root()
        for module in self.modules:
            path = root.joinpath(*module.split(".")).with_suffix(".py")
            if not path.is_file():
                raise PatchError(f"patches/sglang/v{self.release}.patch: {path} does not exist in this SGLang")
            self.apply(module, path.read_text(), str(path))

    def install(self) -> None:
        """Patch the modules when they are imported. Raises PatchError if one is loaded unpatched already."""
        loaded = [name for name in self.modules if name in sys.modules and not is_patched(sys.modules[name])]
        if loaded:
            raise PatchError(
                f"{', '.join(loaded)} was imported before hs_ray could patch it: "
                "let hs_ray start the engine in a process that has not imported sglang"
            )
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(self))

    def require_loaded(self) -> None:
        """Every module of the patch is imported and patched in this process. Raises PatchError."""
        for name in self.modules:
            module = sys.modules.get(name)
            if module is None or not is_patched(module):
                raise PatchError(f"{name} runs without patches/sglang/v{self.release}.patch in this process")


def check_installed() -> Patch:
    """The patch for the installed SGLang, tried on its sources. Quick: imports no sglang."""
    patch = Patch.for_release(installed_release())
    patch.check()
    return patch


def is_patched(module: ModuleType) -> bool:
    return isinstance(getattr(module, "__loader__", None), _Loader)


def _module_name(path: str) -> str:
    """`b/sglang/srt/x.py` -> `sglang.srt.x`."""
    return path.removeprefix("b/").removesuffix(".py").replace("/", ".")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the patch's modules where they are, and loads them through `_Loader`."""

    def __init__(self, patch: Patch):
        self.patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.patch.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            raise PatchError(f"{fullname}: not found in this SGLang")
        spec.loader = _Loader(fullname, spec.origin, self.patch)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the patched text. Never reads or writes .pyc: that of the unpatched file would be used."""

    def __init__(self, fullname: str, path: str, patch: Patch):
        super().__init__(fullname, path)
        self.patch = patch

    def get_source(self, fullname: str) -> str:
        return self.patch.apply(fullname, Path(self.path).read_text(), self.path)

    def get_code(self, fullname: str) -> CodeType:
        # The marked file name keeps tracebacks right: linecache asks this loader for the lines.
        return compile(self.get_source(fullname), f"{self.path}[patched]", "exec", dont_inherit=True)


def versions() -> dict[str, Any]:
    """Versions that decide the values, for run.json and the fingerprint."""
    release = installed_release()
    found = {name: _version(name) for name in ("torch", "transformers", "ray", "pyarrow")}
    return {"sglang": release, "patch": Patch.for_release(release).digest, **found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
