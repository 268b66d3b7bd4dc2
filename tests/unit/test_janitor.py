"""What an engine leaves is gone soon after it: processes, what they mapped in /dev/shm, temporary files."""

import os
import subprocess
import sys
import time
from pathlib import Path

CODE = """
import mmap, multiprocessing, os, subprocess, sys, tempfile, time
from hs_ray.engine import janitor
janitor.start(janitor.own_temporary_folder())
tempfile.NamedTemporaryFile(delete=False)
kept = multiprocessing.get_context("spawn").Lock()  # a semaphore: mapped under another name than its own
fd = os.open("/dev/shm/" + sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096)
mapped = mmap.mmap(fd, 4096)
subprocess.run(["mktemp", "-d"], check=True, stdout=subprocess.DEVNULL)
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    name = f"hs_ray-test-{tmp_path.name}-{time.monotonic_ns()}"
    before = {path.name for path in Path("/dev/shm").iterdir()}
    env = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", CODE, name], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    mine = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert name in mine
    (folder,) = tmp_path.iterdir()
    assert len([path for path in folder.iterdir() if path.name.startswith("tmp")]) == 2
    time.sleep(5)  # the janitor looks every two seconds
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    left = mine
    while time.monotonic() < deadline and (left or Path(f"/proc/{child}").exists() or any(tmp_path.iterdir())):
        time.sleep(0.1)
        left = {path.name for path in Path("/dev/shm").iterdir()} & {n for n in mine if n == name or n[:4] == "sem."}
    assert left == set() and list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{child}").exists()


LAST_MOMENT = """
import os, signal, subprocess
from hs_ray.engine import janitor
janitor.start(janitor.own_temporary_folder())
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_the_janitor_never_saw_is_ended(tmp_path: Path) -> None:
    """As a detokenizer that was about to start when the scheduler beside it was killed."""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LAST_MOMENT], stdout=subprocess.PIPE, text=True, env=env, check=False)
    child = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (child.exists() or any(tmp_path.iterdir())):
        time.sleep(0.1)
    assert not child.exists() and list(tmp_path.iterdir()) == []
