"""SIGTERM: the run ends at once, or once the units in hand are finished."""

import contextlib
import os
import signal
from collections.abc import Iterator
from threading import Event
from typing import Any

from hs_ray.errors import HsRayError


class Stopped(HsRayError):
    """SIGTERM: the node is being taken away, or `ray job stop`."""


class Stop:
    """What SIGTERM leads to: at once, or after the units in hand are finished, if that may take some time."""

    def __init__(self, grace_s: float):
        self.grace_s = grace_s
        self.can_drain = False
        self.draining = Event()

    def on_sigterm(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        if not (self.can_drain and self.grace_s > 0):
            self.on_alarm()
        _write(f"hs_ray: SIGTERM: finishing the units in hand, {self.grace_s:g} s at most\n")
        signal.signal(signal.SIGALRM, self.on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        self.draining.set()

    def on_alarm(self, *_: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        _write("hs_ray: stopped by SIGTERM: what is committed stays; run the same command again to resume\n")
        raise Stopped


def _write(text: str) -> None:
    """At once, and not through print, which may be what was interrupted: SIGKILL follows in 3 s under Ray."""
    os.write(1, text.encode())


@contextlib.contextmanager
def stop_on_sigterm(grace_s: float) -> Iterator[Stop]:
    stop = Stop(grace_s)
    before = signal.signal(signal.SIGTERM, stop.on_sigterm)
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before)
