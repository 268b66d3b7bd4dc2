"""A full disk is waited for: room is asked for again, and small writes, which reserve none, are made again."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
OnWait = Callable[[str, float], None]  # (reason, seconds waited so far): what it raises ends the wait

FULL = (errno.ENOSPC, errno.EDQUOT)
POLL_SECONDS = 1.0  # nobody tells when a disk has room again


def wait_while(reason: Callable[[], str | None], on_wait: OnWait | None = None) -> None:
    """Ask `reason` until it has none to wait any longer."""
    waited = 0.0
    while text := reason():
        if on_wait is not None:
            on_wait(text, waited)
        time.sleep(POLL_SECONDS)
        waited += POLL_SECONDS


def when_there_is_room(write: Callable[[], Result], on_wait: OnWait | None = None) -> Result:
    """What `write` returns, once the disk has room for it; `write` must leave nothing when it fails."""
    written: list[Result] = []

    def attempt() -> str | None:
        try:
            written.append(write())
        except OSError as error:
            if error.errno not in FULL:
                raise
            return f"the disk is full ({error.strerror})"
        return None

    wait_while(attempt, on_wait)
    return written[0]
