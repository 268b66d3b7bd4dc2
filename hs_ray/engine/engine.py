"""HiddenStateEngine: token ids in, states out. One SGLang engine on one group of GPUs, in the actor's process.

A sample is complete when the rows that arrived for its request id cover tokens [0, S) exactly and SGLang has
answered the request. Anything else raises CaptureError; nothing incomplete is ever handed out.

S tokens of a sample, H hidden_size, C state columns.
"""

import asyncio
import gc
import itertools
import json
import os
import secrets
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from threading import Event, Lock, Thread
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hs_ray.engine import cpu, janitor
from hs_ray.engine.capture import CaptureSetup, make_rid
from hs_ray.engine.entry import SchedulerEntry
from hs_ray.engine.options import EngineOptions, server_args, set_environment
from hs_ray.engine.patching import check_installed
from hs_ray.engine.ring import Ring
from hs_ray.engine.start_errors import StartErrors
from hs_ray.engine.ticket import BusyClock, SampleStates, Ticket
from hs_ray.errors import CaptureError, ConfigError, HsRayError

LATE_SECONDS = 60.0  # between the end of a request and its last rows; they come over different channels
START_SECONDS = 1800.0  # a scheduler that has not connected by then never will


class EngineDiedError(HsRayError):
    """The scheduler process is gone; every sample in flight is lost."""


class RequestError(HsRayError):
    """SGLang refused or aborted one request."""

    plain = True


class HiddenStateEngine:
    """Start with the options, `submit` token ids, take the states from the ticket, `release` it.

    on_death: called once, with the reason, when the scheduler process ends by itself.
    poison: fill every extent with NaN before use, to prove that no stale number can come out.
    """

    def __init__(
        self, options: EngineOptions, on_death: Callable[[str], None] | None = None, poison: bool = False
    ) -> None:
        self.options, self.on_death, self.poison = options, on_death, poison
        if options.device == "cpu":
            cpu.prepare(options.tp_size)
        check_installed()
        janitor.start(janitor.own_temporary_folder())
        self.ring = Ring(options.ring_bytes)
        self._serials = itertools.count()
        self._tickets: dict[str, Ticket] = {}
        self.feeding = Lock()  # held by whoever submits a unit, so that units go in one after the other
        self._lost_bytes = 0
        self._busy = BusyClock()
        self._closing = False
        self._dead: str | None = None
        self._connected = Event()
        self._started = Event()
        # An abstract socket: no file to leave behind.
        self._address = f"\0hs_ray-{os.getpid()}-{secrets.token_hex(8)}"
        self._authkey = secrets.token_bytes(32)
        self._listener = Listener(self._address, family="AF_UNIX", authkey=self._authkey)
        Thread(target=self._receive, name="hs_ray-receive", daemon=True).start()
        self._engine = self._start()
        gc.freeze()  # each full collection would look at a million objects of imports, and take half a second
        if not self._connected.wait(START_SECONDS):
            raise CaptureError("the engine started but its capture never connected")
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="hs_ray-requests", daemon=True).start()
        self._check_room()

    def _start(self) -> Any:
        set_environment()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # sglang.Engine itself is a lazy import that cannot be subclassed.
            from sglang.srt.entrypoints.engine import Engine

        class CaptureEngine(Engine):
            @classmethod
            def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
                result, schedulers = super()._launch_scheduler_processes(*args, **kwargs)
                errors.watch(schedulers)
                return result, schedulers

        options = self.options
        setup = CaptureSetup(
            spec=options.spec,
            architecture=options.architecture,
            release=options.release,
            ring_path=self.ring.path,
            ring_size=self.ring.size,
            address=self._address,
            authkey=self._authkey,
        )
        errors = StartErrors()
        CaptureEngine.run_scheduler_process_func = SchedulerEntry(setup, errors.outbox)
        try:
            engine = CaptureEngine(**server_args(options))
        except Exception as error:
            errors.close()
            self._raise_failure(error, errors)
        errors.close()
        self._started.set()
        return engine

    def _raise_failure(self, error: Exception, errors: StartErrors) -> NoReturn:
        """EngineDiedError if a scheduler was killed: another start may succeed. Else what would be raised again."""
        if errors.killed:
            self._died(f"the SGLang scheduler process was killed while it started: {error}")
            raise EngineDiedError(self._dead) from error
        if errors.first is None:
            raise error
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False)  # as `close`: nothing else would end them before this one
        raise errors.first from error

    def _check_room(self) -> None:
        """Raises ConfigError if the plan's longest sample can never be computed: SGLang would refuse it alone."""
        most = self.longest_request
        if self.options.longest_tokens > most:
            self.close()
            raise ConfigError(
                f"max_seq_len = {self.options.max_seq_len}: the longest sample has {self.options.longest_tokens:,} "
                f"tokens, and the engine's KV cache has room for one of {most:,}; lower max_seq_len, raise "
                f"engine.mem_fraction_static or engine.tp_size, or leave out +engine.args.max_total_tokens"
            )

    @property
    def longest_request(self) -> int:
        """Most tokens of one request, by the KV cache that there is room for."""
        return int(self._engine.tokenizer_manager.max_req_input_len) - 1  # SGLang refuses one of that length

    @property
    def attention_backend(self) -> str:
        """The one that SGLang uses: ours to choose or its own choice."""
        return str(self._engine.server_args.attention_backend)

    @property
    def busy_s(self) -> float:
        """Seconds with at least one sample in the engine."""
        return self._busy.seconds

    def submit(self, input_ids: npt.NDArray[np.int32]) -> Ticket:
        """Reserve room for the sample's states (waits for it, in order) and send it to SGLang.

        input_ids: int32 [S], S >= 1. Raises EngineDiedError.
        """
        self._check_alive()
        num_tokens = len(input_ids)
        try:
            extent, waited = self.ring.reserve(num_tokens * self.options.spec.bytes_per_token)
        except CaptureError:
            self._check_alive()  # it died meanwhile
            raise
        if self.poison:
            self.ring.fill(extent, 0xFF)
        rid = make_rid(next(self._serials), extent.offset, num_tokens)
        ticket = Ticket(rid, num_tokens, extent, len(self.options.spec.columns), waited)
        self._tickets[rid] = ticket
        self._busy.enter()
        ticket.future.add_done_callback(lambda _: self._busy.leave())
        asyncio.run_coroutine_threadsafe(self._request(ticket, input_ids.tolist()), self._loop)
        if self._dead:  # died in between: nobody else would tell this ticket
            ticket.fail(EngineDiedError(self._dead))
        return ticket

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDiedError(self._dead)

    def release(self, ticket: Ticket) -> None:
        """Give the sample's shared memory back; its states must no longer be read."""
        ticket.released = True
        self._tickets.pop(ticket.rid, None)
        if ticket.future.done() and ticket.future.exception() is None:
            self.ring.release(ticket.extent)
            return
        # A copy into the extent may still be on its way: it is used again once none can be, or never.
        if ticket.over:
            self._loop.call_soon_threadsafe(self._loop.call_later, LATE_SECONDS, self.ring.release, ticket.extent)
            return
        self._lost_bytes += ticket.extent.size
        if self._lost_bytes > self.ring.size // 4:
            self._died(f"failed requests hold {self._lost_bytes:,} of {self.ring.size:,} bytes of shared memory")

    async def _request(self, ticket: Ticket, input_ids: list[int]) -> None:
        try:
            answer = await self._engine.async_generate(
                input_ids=input_ids, rid=ticket.rid, sampling_params={"max_new_tokens": 0}
            )
            info = answer["meta_info"]
            reason = info.get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise RequestError(f"SGLang aborted the request: {reason.get('message')}")
            if info["prompt_tokens"] != ticket.num_tokens:
                raise RequestError(f"sent {ticket.num_tokens} tokens, SGLang computed {info['prompt_tokens']}")
        except Exception as error:
            ticket.over = True
            ticket.fail(error if isinstance(error, HsRayError) else RequestError(f"{type(error).__name__}: {error}"))
            return
        ticket.over = True
        if ticket.answered():
            self._complete(ticket)
        else:
            self._loop.call_later(LATE_SECONDS, ticket.expire)

    def _complete(self, ticket: Ticket) -> None:
        spec = self.options.spec
        views = self.ring.view(ticket.extent, len(spec.columns), ticket.num_tokens, spec.hidden_size)
        ticket.complete(SampleStates(views, ticket.stats))

    def _receive(self) -> None:
        """Descriptors from the scheduler, until it ends."""
        try:
            connection: Connection = self._listener.accept()
            self._connected.set()
            while True:
                record = json.loads(connection.recv_bytes())
                ticket = self._tickets.get(record["rid"])
                if ticket is not None and ticket.arrived(record["start"], record["count"], record["stats"]):
                    self._complete(ticket)
        except (EOFError, OSError):
            self._started.wait()  # an end before that is for `_start` to judge
            self._died("the SGLang scheduler process ended")
        except Exception as error:
            self._died(f"the capture's descriptors cannot be read: {type(error).__name__}: {error}")

    def _died(self, reason: str) -> None:
        if self._closing or self._dead:
            return
        self._dead = reason
        print(f"hs_ray: {reason}", file=sys.stderr, flush=True)
        if self.on_death:  # first: in the job it ends this process, before anybody takes the death for an error
            self.on_death(reason)
        self.ring.close(reason)
        for ticket in list(self._tickets.values()):
            ticket.fail(EngineDiedError(reason))

    def close(self) -> None:
        """End SGLang's processes. It ends every child of this process: run the engine in one of its own."""
        self._closing = True
        self.ring.close()
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._listener.close()
