"""A small process that outlives another, and removes what that leaves: processes, files in /dev/shm, temporary ones.

Run as a script with the pid of the process to watch over. SGLang, NCCL and Python's multiprocessing name files in
/dev/shm and unlink them at a clean end only; `kill -9` is never clean, and Ray's agents wait a minute for a cluster
that is gone. SGLang's sockets stay at a clean end too. While the watched process lives this one notes which processes
descend from it and which files in /dev/shm they map. Standard library alone, so that it starts in milliseconds.
"""

import contextlib
import getpass
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

LOOK_SECONDS = 2.0
SHM = "/dev/shm/"


def start(*folders: str) -> int:
    """Watch over this process -> the janitor's pid. Detached: not among the children that SGLang ends at its end.

    folders: removed when this process has ended.
    """
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), *folders]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def own_temporary_folder() -> str:
    """Make a folder for the temporary files of this process and those it starts from here on."""
    before = tempfile.gettempdir()
    # What torch compiles is no temporary file: the next engine wants it too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{before}/torchinductor_{getpass.getuser()}")
    folder = tempfile.mkdtemp(prefix="hs-")  # short: SGLang puts sockets there, whose names may have 107 characters
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def stop(pid: int) -> None:
    """End a janitor whose watch is over: what it watches has cleaned up after itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _descendants(pid: int) -> set[int]:
    parents = _parents()
    family = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in family and child not in family}
        if not more:
            return family
        family |= more


def _marked(folders: list[str]) -> set[int]:
    """Processes that were started with one of the folders as TMPDIR.

    Also what began since the last look: its parent is gone, so that nothing else tells whose it is.
    """
    marks = {b"TMPDIR=" + os.fsencode(folder) for folder in folders}
    found = set()
    for pid in _parents():
        with contextlib.suppress(OSError):
            if marks & set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.add(pid)
    return found


def _started(pid: int) -> str | None:
    """Start time in clock ticks: tells a process from a later one with the same pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _is_janitor(pid: int) -> bool:
    """A janitor is its parent's child for a moment, before it detaches; its own watch is not over."""
    try:
        return __file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _mapped(pid: int) -> set[int]:
    """Inodes of the files in /dev/shm that a process has mapped.

    Not names: a semaphore is mapped under a temporary one that is gone, and linked to its own afterwards.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if SHM in line}


def _unlink(inodes: set[int]) -> None:
    for entry in Path(SHM).iterdir():
        with contextlib.suppress(OSError):
            if entry.lstat().st_ino in inodes:
                entry.unlink()


def watch(pid: int, folders: list[str]) -> None:
    """Return once `pid` is gone and nothing of it is left. folders: its own, TMPDIR of what it starts."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    family: dict[int, str] = {}
    files: set[int] = set()
    while not select.select([handle], [], [], LOOK_SECONDS)[0]:
        for member in _descendants(pid) - {pid}:
            started = _started(member)
            if started is not None:
                family[member] = started
            files |= _mapped(member)
        files |= _mapped(pid)
    # What began since the last look.
    late = ({member for known in family for member in _descendants(known)} | _marked(folders)) - family.keys()
    family |= {member: started for member in late if (started := _started(member)) is not None}
    files |= set().union(*map(_mapped, late))
    for member, started in family.items():
        if _started(member) == started and not _is_janitor(member):
            with contextlib.suppress(OSError):
                os.kill(member, signal.SIGKILL)
    in_use = set().union(*(_mapped(other) for other in _parents() if other not in family and other != pid))
    _unlink(files - in_use)


def main() -> None:
    detached = os.fork()
    if detached:
        os.write(1, str(detached).encode())
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # holding the engine's output open would keep its readers waiting
        os.dup2(null, stream)
    folders = sys.argv[2:]
    watch(int(sys.argv[1]), folders)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
