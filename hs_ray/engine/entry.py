"""Carries capture into SGLang's scheduler process.

`SchedulerEntry` stands where SGLang takes its scheduler function (`Engine.run_scheduler_process_func`, an
official override point). The process is spawned, and its target is the first thing that it unpickles, before
any argument that would import sglang: `__setstate__` is early enough to install the patch.
"""

import socket
from typing import Any

from hs_ray.engine import start_errors
from hs_ray.engine.patching import Patch, installed_release

PORT_ARGUMENT, TP_RANK_ARGUMENT = 1, 3  # (server_args, port_args, gpu_id, tp_rank, ...) in every known release


class SchedulerEntry:
    """setup: a CaptureSetup. outbox: where an error of the start is told."""

    def __init__(self, setup: Any, outbox: socket.socket):
        self.setup, self.outbox = setup, outbox

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.patch = Patch.for_release(installed_release())
        self.patch.install()

    def __getstate__(self) -> dict[str, Any]:
        return {"setup": self.setup, "outbox": self.outbox}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with start_errors.told(self.outbox, args[TP_RANK_ARGUMENT]):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

        from hs_ray.engine import capture

        _announce_files(args[PORT_ARGUMENT])
        capture.activate(capture.Capture(self.setup, self.patch, args[TP_RANK_ARGUMENT]))
        # The constructor is the whole start. SGLang catches what it raises, so it is told from inside.
        telling = start_errors.told(self.outbox, args[TP_RANK_ARGUMENT])
        Scheduler.__init__ = telling(Scheduler.__init__)
        return run_scheduler_process(*args, **kwargs)


def _announce_files(port_args: Any) -> None:
    from sglang.srt.managers.load_snapshot import shm_path_for

    from hs_ray.engine import janitor

    janitor.announce(shm_path_for(port_args.instance_id))
