"""What an engine leaves is gone soon after it: processes, what they mapped in /dev/shm, temporary files."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from hs_ray.engine import janitor

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
        time.sleep(0.1)  # the janitor tells nobody what it has done
        left = {path.name for path in Path("/dev/shm").iterdir()} & {n for n in mine if n == name or n[:4] == "sem."}
    assert left == set() and list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{child}").exists()


START = """
import os, signal, subprocess, sys, time
from hs_ray.engine import janitor
janitor.start(janitor.own_temporary_folder())
"""
LAST_MOMENT = """
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
"""
ORPHAN = """
subprocess.run(["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"], check=True)
"""
TITLED = """
code = f"import os, time, {sys.argv[2]} as titles; titles.setproctitle('sglang::detokenizer');"
code += "print(os.getpid(), flush=True); time.sleep(600)"  # until it is killed, which is what is tested
shell = subprocess.Popen(["sh", "-c", 'setsid "$0" -c "$1" &', sys.executable, code], stdout=subprocess.PIPE)
os.write(1, shell.stdout.readline())
"""
KILLED_CHILD = """
mapping = "import mmap, os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 4096);"
mapping += "kept = mmap.mmap(fd, 4096); print(os.getpid(), flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", mapping, sys.argv[1]], stdout=subprocess.PIPE)
os.write(1, child.stdout.readline())
time.sleep(0.5)  # long enough to be seen, shorter than the two seconds between two looks; nothing says that it was
child.kill()
"""
ANNOUNCED = """
from pathlib import Path
janitor.announce(sys.argv[1])
Path(sys.argv[1]).touch()  # as a process that died in the same moment
print(2**22 + 1)  # no pid
"""
END = """
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", [LAST_MOMENT, ORPHAN, KILLED_CHILD, ANNOUNCED])
def test_what_the_janitor_had_no_time_to_see(moment: str, tmp_path: Path) -> None:
    """A detokenizer that was about to start when the scheduler beside it was killed, an agent whose raylet is gone,
    a file of a scheduler that was killed the moment after."""
    shared = Path(f"/dev/shm/hs_ray-test-{tmp_path.name}-{time.monotonic_ns()}")
    command = [sys.executable, "-c", START + moment + END, shared]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    child = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (child.exists() or shared.exists()):
        time.sleep(0.1)  # the janitor tells nobody what it has done
    assert not child.exists() and not shared.exists()


@pytest.mark.parametrize("titles", ["setproctitle", "ray._raylet"])
def test_an_orphan_with_a_title(titles: str, tmp_path: Path) -> None:
    """A title takes the memory that /proc shows as the environment, where the mark is: SGLang's way, and Ray's."""
    command = [sys.executable, "-c", START + TITLED + END, tmp_path, titles]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    orphan = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and orphan.exists():
        time.sleep(0.1)  # the janitor tells nobody what it has done
    assert not orphan.exists()


def test_a_change_in_the_pause_after_a_long_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, the change is seen, and looked for again: what comes is mapped a moment after its name."""
    monkeypatch.setattr(janitor, "SHM", f"{tmp_path}/")
    monkeypatch.setattr(janitor, "LOOK_SECONDS", 3600.0)  # by a change alone
    name = tmp_path / "name"
    watched = subprocess.Popen(["sleep", "20"])
    found = []

    class Family(janitor.Family):
        def look(self) -> None:
            if name.exists():
                found.append(name)
            if len(found) == 2:
                watched.kill()
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass  # the pause is a multiple of the work
            if not name.exists():
                Timer(0.05, name.touch).start()

    monkeypatch.setattr(janitor, "Family", Family)
    janitor.watch(watched.pid, "none")
    watched.wait()
    assert len(found) == 2


def test_a_large_family_is_found_in_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first of it is killed all of it is alive, and a scan of a busy machine takes many milliseconds."""
    code = "for i in 1 2 3 4 5 6 7 8 9; do sleep 600 & done; echo; wait"
    watched = subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE)
    assert watched.stdout is not None
    watched.stdout.readline()
    family = janitor.Family(watched.pid, "none")
    family.look()
    members = set(family.members)
    assert len(members) == 9
    watched.kill()
    watched.wait()
    done = []
    list_folder, kill = Path.iterdir, os.kill
    monkeypatch.setattr(Path, "iterdir", lambda path: done.append(str(path)) or list_folder(path))
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append("kill") or kill(pid, number))
    family.end()
    assert done[:2] == ["/proc", "kill"]
    assert members.isdisjoint(janitor._processes()[1])


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """Of anybody's file in /dev/shm: it is in the list of what his process has mapped."""
    path = os.fsencode(f"/dev/shm/hs_ray-test-{tmp_path.name}-") + b"\xff"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE):
            assert os.fstat(fd).st_ino in janitor._mapped(os.getpid())
    finally:
        os.close(fd)
        Path(os.fsdecode(path)).unlink()
