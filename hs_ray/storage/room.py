"""A full disk is waited for: small writes, which no room is reserved for, are made again until they fit."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

FULL = (errno.ENOSPC, errno.EDQUOT)
POLL_SECONDS = 1.0  # nobody tells when a disk has room again


def when_there_is_room(write: Callable[[], Result], on_wait: Callable[[str, float], None] | None = None) -> Result:
    """What `write` returns, once the disk has room for it; `write` must leave nothing when it fails.

    on_wait(reason, seconds waited so far): called while waiting; what it raises ends the wait.
    """
    waited = 0.0
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if on_wait is not None:
                on_wait(f"the disk is full ({error.strerror})", waited)
        time.sleep(POLL_SECONDS)
        waited += POLL_SECONDS
