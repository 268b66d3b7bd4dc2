"""What a scheduler raises while it starts, told to the actor, which raises it too.

SGLang's own answer to it is SIGQUIT to the scheduler's parent, which ends the actor before it can say anything: Ray
would start another one, and the model would be loaded again only to meet the same error. So a scheduler that raises
tells, and waits to be killed. Its end alone would be an error to the other ranks: they would raise their own, and those
that have started would send SIGQUIT for it.

A socket that keeps messages apart: ranks may tell at the same time. The first counts.
"""

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from hs_ray import errors
from hs_ray.errors import HsRayError

MOST_BYTES = 2**16  # of one message
MOST_CHARACTERS = 4000  # of an error's text
ENDING_SECONDS = 10.0  # in which a killed process, with all its memory, is gone after its sockets are


class EngineStartError(HsRayError):
    """A scheduler raised an error of SGLang's while it started: it would raise it again."""

    plain = True


@contextlib.contextmanager
def told(outbox: socket.socket, tp_rank: int) -> Iterator[None]:
    """In a scheduler: what is raised inside is told to the actor, which ends this process."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever it is, it would come again
        if not getattr(error, "plain", False):
            traceback.print_exc()
        with contextlib.suppress(OSError):  # the actor does not listen: the start is over, or was given up
            outbox.send(_message(error, tp_rank))
            outbox.recv(1)
        os._exit(1)  # no clean end: threads and communicators of half a start may wait for ever


def _message(error: Exception, tp_rank: int) -> bytes:
    """By name and text: not every exception survives pickle, and one that does not would be waited for."""
    kind, text = type(error).__name__, str(error)[:MOST_CHARACTERS]
    if not isinstance(error, HsRayError):
        *_, place = traceback.extract_tb(error.__traceback__)
        text = (
            f"SGLang's scheduler of rank {tp_rank} raised while it started: {kind}: {text} "
            f"({Path(place.filename).name}:{place.lineno}; the traceback is in this log and the actor's)"
        )
        kind = EngineStartError.__name__
    return json.dumps({"pid": os.getpid(), "kind": kind, "text": text}).encode()


class StartErrors:
    """The actor's end. `outbox` travels to every scheduler, by the pickle with which it is spawned."""

    def __init__(self) -> None:
        self._inbox, self.outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._schedulers: Sequence[BaseProcess] = ()
        self._thread = Thread(target=self._listen, name="hs_ray-start", daemon=True)
        self.first: HsRayError | None = None  # what was told
        self.killed = False  # a signal from outside ended a scheduler: another start may succeed

    def watch(self, schedulers: Sequence[BaseProcess]) -> None:
        """Listen; what is told ends all schedulers, and so SGLang's wait for them."""
        self._schedulers = schedulers
        self._thread.start()

    def close(self) -> None:
        """The start is over, well or not: `first` and `killed` say how."""
        self._inbox.shutdown(socket.SHUT_RDWR)
        if self._schedulers:
            self._thread.join()
        if self.first is None:
            self.killed = any((process.exitcode or 0) < 0 for process in self._schedulers)
        self._inbox.close()
        self.outbox.close()

    def _listen(self) -> None:
        message = self._inbox.recv(MOST_BYTES)
        if not message:
            return  # closed
        record = json.loads(message)
        self.first = getattr(errors, record["kind"], EngineStartError)(record["text"])
        if isinstance(self.first, EngineStartError):  # what we raise ourselves, no peer's end is the reason of
            self.killed = _was_killed([process for process in self._schedulers if process.pid != record["pid"]])
        _kill(self._schedulers)


def _was_killed(others: Sequence[BaseProcess]) -> bool:
    """Whether SIGKILL (of the out-of-memory killer, say) ended a rank: its peers raise that the connection is gone."""
    deadline = time.monotonic() + ENDING_SECONDS
    for process in others:
        process.join(max(0.0, deadline - time.monotonic()))
    return any(process.exitcode == -signal.SIGKILL for process in others)


def _kill(schedulers: Sequence[BaseProcess]) -> None:
    """All at once: one that saw another's end could still send SIGQUIT, so all are stopped first."""
    alive = [process for process in schedulers if process.is_alive()]
    for process in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGSTOP)
    for process in alive:
        process.kill()
