"""`python -m hs_ray.prove.worker REQUEST RESULT`: one proof; both are JSON files.

Started in a session of its own by `run`. It ends that session when its parent is gone, so a killed actor leaves no
engine behind.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from threading import Thread


def main() -> None:
    # Imported here, since SGLang's spawned processes import this module as their main.
    from hs_ray.engine.engine import EngineDiedError
    from hs_ray.errors import HsRayError
    from hs_ray.prove.measure import measure
    from hs_ray.prove.proofs import add_proofs
    from hs_ray.prove.request import Request

    request, result = Path(sys.argv[1]), Path(sys.argv[2])
    Thread(target=_end_with, args=(os.getppid(), request.parent), daemon=True).start()
    try:
        proof = measure(Request.from_json(request.read_text()))
    except HsRayError as error:
        result.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        if isinstance(error, EngineDiedError):
            os.kill(os.getpid(), signal.SIGKILL)  # as its engine did: `run` tries again unless that raised
        sys.exit(error.exit_code)
    add_proofs(result, [proof])


def _end_with(parent: int, folder: Path) -> None:
    from hs_ray.prove.request import FOLDER_PREFIX

    while os.getppid() == parent:
        time.sleep(1)
    if folder.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
