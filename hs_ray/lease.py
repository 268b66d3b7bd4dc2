"""Who may commit: a driver's lease on an output, its epoch, and the attempts that run under it.

A lease is `_run/leases/<epoch>.json`, created exclusively, so an epoch belongs to one driver for ever. Its file
is rewritten as a heartbeat and outlives its release: the next driver must get a higher number, because attempts
of an older epoch may still be running somewhere and `check_epoch` is what stops them.

Ages are differences of the store's own time stamps: clocks of two hosts are never compared.
"""

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hs_ray.errors import LostLeaseError, OutputError
from hs_ray.schema import ATTEMPTS, LEASES, unit_name
from hs_ray.storage import Storage

log = logging.getLogger(__name__)

BEATS = 4  # heartbeats in one time to live
# What others read in a lease's file. A process of a host without /proc has no start.
WRITTEN: dict[str, type | tuple[type, ...]] = {
    "holder": str,
    "host": str,
    "pid": int,
    "identity": str,
    "process_start": (str, type(None)),
    "ttl_s": (int, float),
    "released": bool,
}
RELEASED = '{"released": true}'


def _epochs(storage: Storage) -> dict[int, float]:
    """Epoch -> time of its last heartbeat, by the clock of the store."""
    names = {Path(info.path).stem: info.mtime for info in storage.list(LEASES)}
    return {int(name): mtime for name, mtime in names.items() if name.isdigit()}


def _lease_path(epoch: int) -> str:
    return f"{LEASES}/{epoch:06d}.json"


def _process_start(pid: int) -> str | None:
    """When a process of this host began, in clock ticks since boot; None if there is none (pids are used again)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _host_identity() -> str:
    """Equal for two processes only if each can look the other's pid up."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _is_dead(info: dict[str, Any]) -> bool:
    """A holder that let go, or ran on this host and is gone."""
    if info["released"]:
        return True
    return info["identity"] == _host_identity() and _process_start(info["pid"]) != info["process_start"]


class Lease:
    """Held from `acquire` to `release`; `start` keeps it alive from a thread of its own."""

    def __init__(self, storage: Storage, epoch: int, info: dict[str, Any]):
        self.storage, self.epoch, self._info = storage, epoch, info
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(cls, storage: Storage, ttl_s: float, holder: str) -> "Lease":
        """Take the output over from nobody, or from a holder that is dead.

        ttl_s: seconds without a heartbeat after which a holder counts as dead; one on this host whose process
        is gone is dead at once. Raises OutputError, naming the holder, if a live one exists.
        """
        info = {
            "holder": holder,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "identity": _host_identity(),
            "process_start": _process_start(os.getpid()),
            "nonce": secrets.token_hex(8),  # tells our file from another's with the same epoch
            "ttl_s": ttl_s,
            "released": False,
        }
        while True:
            epochs = _epochs(storage)
            newest = max(epochs, default=0)
            if newest:
                _refuse_if_alive(storage, newest, epochs[newest])
            lease = cls(storage, newest + 1, info)
            if storage.create(_lease_path(lease.epoch), lease._content()):
                for epoch in epochs:
                    storage.remove(_lease_path(epoch))
                return lease

    def _content(self) -> bytes:
        return json.dumps(self._info | {"epoch": self.epoch}, indent=1).encode()

    def start(self) -> None:
        """Begin the heartbeat."""
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._info["ttl_s"] / BEATS):
            try:
                self.check()
                self.storage.write(_lease_path(self.epoch), self._content())
            except LostLeaseError as error:
                log.error("%s", error)
                return
            except Exception as error:  # noqa: BLE001  # a store that is unwell must not end the heartbeat
                log.warning("heartbeat of the lease failed, trying again: %s", error)

    def check(self) -> None:
        """Raises LostLeaseError if another driver took the output over."""
        check_epoch(self.storage, self.epoch)

    def release(self) -> None:
        """Stop the heartbeat and let the next driver in at once. The epoch stays used.

        Where the store is full or unwell the next driver waits for this one's end to show: what the run came to must
        not be hidden by that.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._info["released"] = True
        try:
            if max(_epochs(self.storage), default=0) == self.epoch:
                self.storage.write(_lease_path(self.epoch), self._content())
        except OSError as error:
            log.warning("the lease of epoch %d could not be released: %s", self.epoch, error)


def _refuse_if_alive(storage: Storage, epoch: int, beat: float) -> None:
    info = _read(storage, epoch)
    if info is None or _is_dead(info):
        return
    age = storage.now() - beat
    if age < info["ttl_s"]:
        raise OutputError(
            f"output.path = {storage.root}: in use by {info['holder']} (host {info['host']}, process {info['pid']}, "
            f"last sign of life {max(age, 0):.0f} s ago); wait for it or stop it. If it is dead, its lease ends in "
            f"{info['ttl_s'] - age:.0f} s"
        )


def _read(storage: Storage, epoch: int) -> dict[str, Any] | None:
    """What a lease's file says; None for one that a newer holder has just removed, and `create` will see."""
    path = _lease_path(epoch)
    try:
        info = json.loads(storage.read_bytes(path))
        alive = {} if info["released"] is True else WRITTEN  # of one that was let go nothing else is read
        wrong = [name for name, kind in alive.items() if not isinstance(info[name], kind)]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        wrong = [repr(error)]
    if wrong:  # who holds it cannot be told. Not removed: its number is what stops older attempts
        raise OutputError(
            f"output.path = {storage.root}: {path} is damaged ({', '.join(wrong)}), so nobody knows who holds the "
            f"output; make sure that no other run works on it, then write {RELEASED} into that file"
        )
    return dict(info)


def check_epoch(storage: Storage, epoch: int) -> None:
    """Raises LostLeaseError if a newer epoch exists: one listing request."""
    newest = max(_epochs(storage), default=0)
    if newest > epoch:
        raise LostLeaseError(f"{storage.root}: taken over by another driver (epoch {newest}, ours is {epoch})")


# --- attempts: who was running what when an engine died ---


def new_attempt(epoch: int) -> str:
    """An attempt's id, e.g. `0003-9f2c1a7e`: epoch and chance."""
    return f"{epoch:04d}-{secrets.token_hex(4)}"


def begin_attempt(storage: Storage, unit: int, epoch: int, engine: str, attempt: str | None = None) -> str:
    """Note that an engine starts on a unit. Returns the attempt's id: the one given, or a new one."""
    attempt = attempt or new_attempt(epoch)
    info = {"unit": unit, "attempt": attempt, "epoch": epoch, "engine": engine, "host": socket.gethostname()}
    storage.write(_attempt_path(unit, attempt), json.dumps(info).encode())
    return attempt


def end_attempt(storage: Storage, unit: int, attempt: str) -> None:
    """The attempt ended and its engine lives, whether it committed or not."""
    storage.remove(_attempt_path(unit, attempt))


def deaths(storage: Storage, unit: int, epoch: int, survived: Collection[str] = ()) -> int:
    """Attempts of this unit and epoch that began and never ended: deaths of an engine that the unit took part in.

    survived: attempts of the engine that asks, which lives, whatever became of their notes. Ask before
    `begin_attempt`, and while no other attempt of the unit runs: a running one counts too.
    """
    prefix = f"{unit_name(unit)}-"
    notes = storage.list(ATTEMPTS, f"{prefix}{epoch:04d}-")
    return sum(Path(info.path).stem.removeprefix(prefix) not in survived for info in notes)


def _attempt_path(unit: int, attempt: str) -> str:
    return f"{ATTEMPTS}/{unit_name(unit)}-{attempt}.json"
