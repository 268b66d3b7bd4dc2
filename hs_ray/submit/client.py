"""Ray's job server over HTTP: submit once, look, follow the log, whatever the network does."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests

from hs_ray.errors import ConfigError, HsRayError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 15.0
QUIET_S = 60.0  # without a line of the log: look whether the job still runs, and follow it anew
REQUEST_S = 10.0

NOISY = (  # loggers that name every ignored file and every closed connection
    "ray._private.runtime_env.packaging",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
)

Say = Callable[[str], None]


class NotThereYetError(Exception):
    """The cluster does not answer, or its agent is not up: worth another try."""


class ClusterGoneError(HsRayError):
    """It did not answer for as long as we were told to wait."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended. exit_code: of the driver; None if nobody saw it end (its node or the head is gone)."""

    status: str  # SUCCEEDED, FAILED, STOPPED, or LOST: the cluster does not know the job
    exit_code: int | None
    message: str = ""
    error: str = ""  # Ray's kind of failure, for example RUNTIME_ENV_SETUP_FAILURE


def job_server(address: str | None) -> str:
    """The dashboard's address: as given, else of RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else of this machine.

    Raises ConfigError for what is no HTTP address.
    """
    found = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or DEFAULT_ADDRESS
    if not found.startswith(("http://", "https://")):
        raise ConfigError(f"--address = {found}: the dashboard's address; for example {DEFAULT_ADDRESS}")
    return found.rstrip("/")


def auth_mode(address: str) -> str:
    """`token` or `disabled`: what the cluster asks for, which it tells to everyone. Raises NotThereYetError."""
    try:
        answer = requests.get(f"{address}/api/authentication_mode", timeout=REQUEST_S)
    except requests.RequestException as error:
        raise NotThereYetError(f"{address} does not answer ({type(error).__name__})") from error
    if answer.status_code == 404:  # older than token authentication
        return "disabled"
    if answer.status_code != 200:
        raise NotThereYetError(f"{address} answers {answer.status_code}")
    mode: str = answer.json()["authentication_mode"]
    return mode


def with_patience(
    action: Callable[[], Any], wait_s: float, say: Say, sleep: Callable[[float], None] = time.sleep
) -> Any:
    """`action` until it does not raise NotThereYetError, with longer and longer pauses. Raises ClusterGoneError."""
    pause, deadline, said = FIRST_WAIT_S, time.monotonic() + wait_s, ""
    while True:
        try:
            return action()
        except NotThereYetError as error:
            if time.monotonic() + pause > deadline:
                raise ClusterGoneError(f"{error}; waited {wait_s:.0f} s") from error
            if str(error) != said:
                said = str(error)
                say(f"waiting for the cluster: {said}")
        sleep(pause)
        pause = min(2 * pause, LONGEST_WAIT_S)


class JobServer:
    """One cluster's job server. Every method raises NotThereYetError where another try may help."""

    def __init__(self, address: str):
        self.address = address
        self._client: Any = None

    def _connected(self) -> Any:
        if self._client is None:
            # Explicit, whatever a token in the home folder makes Ray guess; the user's own choice goes first.
            os.environ.setdefault("RAY_AUTH_MODE", auth_mode(self.address))
            os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # or Ray takes RAY_ADDRESS before what it is given
            from ray.job_submission import JobSubmissionClient

            for name in NOISY:
                logging.getLogger(name).setLevel(logging.WARNING)
            with _translated():
                self._client = JobSubmissionClient(self.address)
        return self._client

    def submit(self, submission_id: str, entrypoint: str, runtime_env: dict[str, Any]) -> None:
        """Start the job, or find that an earlier try has."""
        client = self._connected()
        try:
            with _translated():
                client.submit_job(entrypoint=entrypoint, submission_id=submission_id, runtime_env=dict(runtime_env))
        except NotThereYetError:
            if self.look(submission_id) is None:  # otherwise the answer was lost, not the request
                raise

    def look(self, submission_id: str) -> Ended | None:
        """How the job stands: None if the cluster does not know it; exit_code is None while it runs."""
        client = self._connected()
        try:
            with _translated():
                info = client.get_job_info(submission_id)
        except LookupError:
            return None
        return Ended(str(info.status.value), info.driver_exit_code, info.message or "", str(info.error_type or ""))

    def follow(self, submission_id: str, line: Say, wait_s: float, say: Say) -> Ended:
        """Give every line of the log to `line` once, until the job ends or the cluster has lost it."""
        log = _Log(line)
        while True:
            self._tail(submission_id, log)
            ended = with_patience(lambda: self.look(submission_id), wait_s, say)
            if ended is None:
                return Ended("LOST", None, "the cluster does not know the job any more: its head was replaced")
            if ended.status in ("SUCCEEDED", "FAILED", "STOPPED"):
                self._tail(submission_id, log)  # what was written between the last line and the end
                log.finish()
                return ended
            time.sleep(FIRST_WAIT_S)

    def _tail(self, submission_id: str, log: "_Log") -> None:
        """The log from its first character; `log` skips what it has seen. Ends with the job, or with any trouble."""

        async def read() -> None:
            log.restart()
            tail = aiter(self._connected().tail_job_logs(submission_id))
            while True:
                try:
                    log.add(await asyncio.wait_for(anext(tail), QUIET_S))
                except StopAsyncIteration:
                    return

        import aiohttp

        try:
            asyncio.run(read())
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError, NotThereYetError):
            return  # `look` says what has happened


class _Log:
    """A log that is read again from its start after each interruption: every line goes out once."""

    def __init__(self, line: Say):
        self._line, self._seen, self._position, self._rest = line, 0, 0, ""

    def restart(self) -> None:
        self._position = 0

    def add(self, text: str) -> None:
        new = text[max(0, self._seen - self._position) :]
        self._position += len(text)
        self._seen = max(self._seen, self._position)
        *lines, self._rest = (self._rest + new).split("\n")
        for line in lines:
            self._line(line)

    def finish(self) -> None:
        if self._rest:
            self._line(self._rest)
        self._rest = ""


@contextmanager
def _translated() -> Iterator[None]:
    """Ray's client raises RuntimeError for every answer but 200, and ConnectionError for none."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        raise ConfigError(
            "RAY_AUTH_MODE: the cluster asks for a token, and RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and "
            f"~/.ray/auth_token hold none that it takes; set one of them ({str(error).splitlines()[0]})"
        ) from error
    except (requests.RequestException, ConnectionError) as error:
        raise NotThereYetError(f"no answer ({type(error).__name__})") from error
    except RuntimeError as error:
        text = str(error)
        if "status code 404" in text:
            raise LookupError(text) from error
        if "status code 5" in text:  # "No available agent", in the first seconds of a cluster
            raise NotThereYetError(text.splitlines()[0][:200]) from error
        raise
