"""Which units may run beside others in one engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Gate:
    """Units run together; one that took part in several deaths runs alone, so that it alone is to blame."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = 0
        self._alone = False
        self._waiting = 0  # suspects, who go before newcomers

    @contextmanager
    def enter(self, alone: bool) -> Iterator[None]:
        with self._changed:
            if alone:
                self._waiting += 1
                self._changed.wait_for(lambda: not self._alone and self._running == 0)
                self._waiting -= 1
                self._alone = True
            else:
                self._changed.wait_for(lambda: not self._alone and self._waiting == 0)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                if alone:
                    self._alone = False
                self._changed.notify_all()
