"""The loop over attempts: which end is worth another one, and how it is known that one made progress."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hs_ray.schema import DONE
from hs_ray.storage import open_storage
from hs_ray.submit.client import ClusterGoneError, Ended, Say, with_patience

FINAL_CODES = (0, 2, 3)  # complete; the user must change something; finished, with rejects
HOPELESS = ("RUNTIME_ENV_SETUP_FAILURE", "JOB_ENTRYPOINT_COMMAND_START_ERROR")  # the same again, however often
MESSAGE = 1000  # characters of it that are shown, the last ones
AGAIN_S = 5.0
COMMITTED = re.compile(r"hs_ray: (resuming: )?([\d,]+)(?:/| of )[\d,]+ units")


class Server(Protocol):
    def submit(self, submission_id: str, entrypoint: str, runtime_env: dict[str, Any]) -> None: ...
    def follow(self, submission_id: str, line: Say, wait_s: float, say: Say) -> Ended: ...


@dataclass(frozen=True)
class Run:
    """What is submitted, and how stubbornly."""

    name: str  # submission ids are NAME-1, NAME-2, ...
    entrypoint: str  # a shell command
    runtime_env: dict[str, Any]
    output: str
    storage_options: dict[str, Any]
    attempts: int
    wait_s: float  # for a cluster that does not answer
    lease_s: float  # after a driver that nobody saw end: its lease on the output must run out


class Committed:
    """How many units an attempt committed: counted where the output can be seen from here, else as its log says.

    What an attempt begins with may be less than what the one before it ended with: a node's disk may be gone.
    """

    def __init__(self, output: str, storage_options: dict[str, Any]):
        self._output, self._options = output, storage_options
        self._before = self._in_log = self._markers_before = 0

    def begin(self) -> None:
        self._before, self._markers_before = self._in_log, self._markers()

    def hear(self, line: str) -> None:
        if match := COMMITTED.match(line):
            self._in_log = int(match[2].replace(",", ""))
            if match[1]:
                self._before = min(self._before, self._in_log)

    def gained(self) -> int:
        return max(self._in_log - self._before, self._markers() - self._markers_before)

    def _markers(self) -> int:
        try:
            return len(open_storage(self._output, self._options).list(DONE))
        except Exception:  # noqa: BLE001  # no credentials here, a disk of the cluster's, ...: then the log must do
            return 0


def run_until_done(
    server: Server, run: Run, *, echo: Say, say: Say, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Submit until the run is done or another attempt would not help. Returns the exit code of its last driver."""
    committed = Committed(run.output, run.storage_options)

    def line(text: str) -> None:
        committed.hear(text)
        echo(text)

    code = 1
    for attempt in range(1, run.attempts + 1):
        name = f"{run.name}-{attempt}"
        committed.begin()
        try:
            submit = partial(server.submit, name, run.entrypoint, run.runtime_env)
            with_patience(submit, run.wait_s, say, sleep)
            say(f"attempt {attempt} of at most {run.attempts}: job {name}")
            ended = server.follow(name, line, run.wait_s, say)
        except ClusterGoneError as error:
            say(f"the cluster is gone: {error}; when it is back, run the same command again to resume")
            return 1
        code = exit_code(ended)
        if ended.status == "STOPPED":
            say("the job was stopped; run the same command again to resume")
            return code
        if ended.exit_code in FINAL_CODES:
            return code
        if ended.error in HOPELESS:
            say(f"the job never began: {ended.message[-MESSAGE:]}")
            return 2
        gained = committed.gained()
        lost = ended.exit_code is None
        say(f"the job ended with {'nobody watching' if lost else f'code {code}'}, {gained:,} units committed by it")
        if lost:
            say(ended.message.splitlines()[0] if ended.message else "no reason given")
        elif gained <= 0:
            say("it committed nothing, so another attempt would not either; not submitted again")
            return code
        if attempt < run.attempts:
            pause = run.lease_s if lost else AGAIN_S
            say(f"submitting it again in {pause:.0f} s")
            sleep(pause)
    say(f"{run.attempts} attempts were made (--attempts); run the same command again to go on")
    return code


def exit_code(ended: Ended) -> int:
    """The driver's exit code as a shell gives it: 128 + N for signal N; 1 where it is not known."""
    if ended.status == "SUCCEEDED":
        return 0
    if ended.exit_code is None:
        return 1
    return ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code
