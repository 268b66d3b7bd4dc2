"""A small process that outlives another, and removes what that leaves: processes, files in /dev/shm, temporary ones.

Run as a script with the pid of the process to watch over. SGLang, NCCL and Python's multiprocessing name files in
/dev/shm and unlink them at a clean end only; `kill -9` is never clean, and Ray's agents wait a minute for a cluster
that is gone. SGLang's sockets stay at a clean end too. While the watched process lives this one notes which processes
descend from it and which files in /dev/shm they map; what began at the last moment is known by a mark in its
environment. Out of reach is what began after the last look (two seconds ago at most), has lost its parent and bears no
mark: it was given an environment of its own, or was forked from the watched process without an exec.
Standard library alone, so that it starts in milliseconds.
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
import time
from collections.abc import Iterable
from pathlib import Path

LOOK_SECONDS = 2.0  # between two looks at the processes
GLANCE_SECONDS = 0.05  # between two at whether /dev/shm has changed: whoever made a file may be killed the moment after
SETTLE_SECONDS = 0.2  # from a name in /dev/shm to its mapping
END_SECONDS = 10.0  # for what was killed to be gone
SHM = "/dev/shm/"
NOTE = "shm-"  # in the folder for temporary files: names of files in /dev/shm
MARK = "HS_RAY_WATCHED"  # in the environment of what starts under a watch: its parent may be gone, unseen


def start(*folders: str) -> int:
    """Watch over this process -> the janitor's pid. Detached: not among the children that SGLang ends at its end.

    What this process starts from here on is marked, and ends with it. folders: removed when this process has ended.
    """
    mark = os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
    # SGLang's and Ray's processes set a title, and setproctitle writes it over what /proc shows as their environment,
    # unless it is told to keep within the command line.
    os.environ["SPT_NOENV"] = "1"
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), mark, *folders]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def own_temporary_folder() -> str:
    """Make a folder for the temporary files of this process and those it starts from here on."""
    before = tempfile.gettempdir()
    # What torch compiles is no temporary file: the next engine wants it too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{before}/torchinductor_{getpass.getuser()}")
    folder = tempfile.mkdtemp(prefix="hs-")  # short: SGLang puts sockets there, whose names may have 107 characters
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def announce(path: str) -> None:
    """A file in /dev/shm that this process is about to make: it may be killed before anybody has seen it there."""
    Path(tempfile.gettempdir(), NOTE + Path(path).name).touch()


def stop(pid: int) -> None:
    """End a janitor whose watch is over: what it watches has cleaned up after itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _processes() -> tuple[dict[int, int], dict[int, str]]:
    """The parent of each process; the start time, in clock ticks, of each that is no zombie.

    The start time tells a process from a later one with the same pid.
    """
    parents, started = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                pid = int(entry.name)
                parents[pid] = int(fields[1])
                if fields[0] != b"Z":
                    started[pid] = fields[19].decode()
    return parents, started


def _descendants(pids: set[int], parents: dict[int, int]) -> set[int]:
    """The processes, and what descends from any of them."""
    family = set(pids)
    while True:
        more = {child for child, parent in parents.items() if parent in family and child not in family}
        if not more:
            return family
        family |= more


def _marked(mark: str, pids: Iterable[int]) -> set[int]:
    """Those that were started with the mark in their environment."""
    word = os.fsencode(f"{MARK}={mark}")
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


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
        text = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return set()
    word = SHM.encode()
    lines = text.splitlines() if word in text else []  # thousands in an engine's process, and few processes have any
    return {int(line.split()[4]) for line in lines if word in line}


def _unlink(inodes: set[int]) -> None:
    for entry in Path(SHM).iterdir():
        with contextlib.suppress(OSError):
            if entry.lstat().st_ino in inodes:
                entry.unlink()


class Family:
    """The processes that descend from one, as far as they were seen, and the files in /dev/shm that they mapped."""

    def __init__(self, pid: int, mark: str):
        self.pid, self.mark = pid, mark
        self.members: dict[int, str] = {}  # pid -> start time
        self.files: set[int] = set()

    def look(self) -> None:
        self._add({self.pid}, *_processes())
        self.files |= _mapped(self.pid)

    def _add(self, pids: set[int], parents: dict[int, int], started: dict[int, str]) -> None:
        """Forget the members that are gone; take in what descends from the rest and from `pids`."""
        self.members = {pid: since for pid, since in self.members.items() if started.get(pid) == since}
        for pid in _descendants(pids | self.members.keys(), parents) - self.members.keys() - {self.pid}:
            if pid in started and not _is_janitor(pid):
                self.members[pid] = started[pid]
        self.files |= set().union(*map(_mapped, self.members))

    def end(self) -> None:
        """Kill what is left of it, and what that has started meanwhile; unlink the files that nobody else maps."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            parents, started = _processes()
            self._add(_marked(self.mark, started), parents, started)
            if not self.members:
                break
            for pid in self.members:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(GLANCE_SECONDS)  # what is killed goes a moment later, and only its parent is told
        others = _processes()[0].keys() - self.members.keys()
        _unlink(self.files - set().union(*map(_mapped, others)))


def watch(pid: int, mark: str) -> None:
    """Return once `pid` is gone and nothing of it is left."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    family = Family(pid, mark)
    names, changed, due = 0, 0.0, False  # names: when the last look began, those in /dev/shm had changed then
    looked, pause = 0.0, GLANCE_SECONDS
    while not select.select([handle], [], [], pause)[0]:
        now, worked = time.monotonic(), time.process_time()
        before, names = names, Path(SHM).stat().st_mtime_ns
        if names != before:  # however long the pause was
            changed, due = now, True
        if due or now - looked > LOOK_SECONDS:
            family.look()
            due = now - changed < SETTLE_SECONDS  # what comes is mapped a moment later
            looked = time.monotonic()
            # A fifth of a core at most, where /dev/shm is busy. A wait for a core is no work.
            pause = max(GLANCE_SECONDS, 4 * (time.process_time() - worked))
    family.end()


def main() -> None:
    detached = os.fork()
    if detached:
        os.write(1, str(detached).encode())
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # holding the engine's output open would keep its readers waiting
        os.dup2(null, stream)
    pid, mark, *folders = sys.argv[1:]
    watch(int(pid), mark)
    for folder in folders:
        for note in Path(folder).glob(f"{NOTE}*"):
            Path(SHM, note.name.removeprefix(NOTE)).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
