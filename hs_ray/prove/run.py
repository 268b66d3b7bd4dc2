"""Proofs from the outside: started in a process of their own, with a time limit, and kept."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hs_ray.engine.models import refusal
from hs_ray.errors import CaptureError, UnsupportedError
from hs_ray.prove.proofs import Proof, add_proofs, cached_path, find_proof, lock, read_proofs
from hs_ray.prove.request import FOLDER_PREFIX, Request, from_options

log = logging.getLogger(__name__)

LIMIT_SECONDS = 900.0  # of one proof: about a minute on a GPU, longer where kernels are compiled first
TRIES = 3  # of a proof whose process or engine was killed: out of memory, a node that is being emptied
SHOWN = 4000  # characters of the end of a failed proof's output
RAISED = " hit an exception: "  # SGLang's words, of a process of its that raised: it then kills its parent


class ProofError(CaptureError):
    """The states that SGLang gave are not those of transformers, or the proof could not be run."""

    plain = True


def check(architecture: str, release: str, model: str, device: str | None = None) -> None:
    """For the driver; quick, imports nothing heavy. Raises UnsupportedError for a class that is not known.

    device: cpu or cuda, None where it is not known yet.
    """
    reason = refusal(architecture, release, device)
    if reason:
        raise UnsupportedError(f"model.path = {model}: {reason}")


def ensure(options: Any, mode: str = "auto") -> Proof | None:
    """Before an engine starts: the proof in force for it, made first where there is none.

    options: its EngineOptions; mode: capture.prove, auto, always or never. Raises ProofError. Starts the proof's
    engine on the devices that this process sees, and returns after it has ended.
    """
    if mode == "never":
        return None
    request = from_options(options)
    if mode == "auto" and (proof := find_proof(request.key)):
        return proof
    with lock(request.key):
        if mode == "auto" and (proof := find_proof(request.key)):  # made while we waited
            return proof
        log.info("proving %s against transformers, once (a minute or two)", request.key)
        proof = prove(request)
        if not proof.ok:
            raise ProofError(f"{request.key}: the states are not those of transformers\n" + "\n".join(proof.table))
        keep(proof)
        return proof


def keep(proof: Proof) -> Path:
    """Put a proof that passed into the user's cache. Returns its file."""
    path = cached_path(proof.key)
    add_proofs(path, [proof])
    return path


def prove(request: Request, limit_s: float = LIMIT_SECONDS, tries: int = TRIES) -> Proof:
    """Run one proof, passed or not; one that is killed, again. Raises ProofError where none ran to its end."""
    check(request.architecture, request.release, request.architecture, request.device)
    outcome = _prove_once(request, limit_s)
    if isinstance(outcome, Proof):
        return outcome
    if outcome.killed and tries > 1:
        log.warning("%s: the proof was killed (%s); again", request.key, outcome.ending)
        return prove(request, limit_s, tries - 1)
    raise ProofError(
        f"{request.key}: the proof did not run to its end ({outcome.ending}); capture.prove=never goes on "
        f"without one, jobs/prove.py tries again. Its output ends:\n{outcome.text}"
    )


@dataclass(frozen=True)
class _CutOff:
    """A proof without a result. killed: from outside, it or its engine; what either raised, it would raise again."""

    ending: str
    text: str
    killed: bool


def _prove_once(request: Request, limit_s: float) -> Proof | _CutOff:
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        asked, result, output = (Path(name) / part for part in ("request.json", "result.json", "output.txt"))
        asked.write_text(request.to_json())
        command = [sys.executable, "-m", "hs_ray.prove.worker", str(asked), str(result)]
        code = _run_group(command, Path(name), output, limit_s)
        # The result counts, not the exit code: an engine's end may take its process with it.
        if result.is_file():
            return read_proofs(result)[0]
        said, reason = output.read_text(errors="replace"), result.with_suffix(".error")
        # The worker may know no more than that its engine is gone: why, the engine's own last words say.
        parts = [reason.read_text() if reason.is_file() else "", said[-SHOWN:].strip()]
        killed = code is not None and code < 0 and RAISED not in said
        return _CutOff(_ending(code, limit_s), "\n".join(filter(None, parts)), killed)


def _run_group(command: list[str], folder: Path, output: Path, limit_s: float) -> int | None:
    """Run in a session of its own, with its temporary files in `folder`, and end all of it. None: it hit the limit."""
    # The package may be a checkout that is on this process's path only.
    paths = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",  # a twin is small: threads that wait for each other took half of the time
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ending(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"stopped after {limit_s:.0f} s"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
