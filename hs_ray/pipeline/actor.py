"""HiddenStateExtractor: the actor of the pipeline. One engine; several units at once, one a calling thread.

A call returns when its unit is committed. Whatever goes wrong, an attempt that did not commit leaves nothing.
"""

import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import ray

from hs_ray import prove
from hs_ray.config import ModelConfig
from hs_ray.engine import canary, cpu
from hs_ray.engine.engine import EngineDiedError, HiddenStateEngine
from hs_ray.engine.options import EngineOptions
from hs_ray.engine.start_errors import EngineStartError
from hs_ray.errors import RunError
from hs_ray.extract import extract_unit
from hs_ray.lease import begin_attempt, check_epoch, deaths, end_attempt, new_attempt
from hs_ray.model import local_weights, resolve_model
from hs_ray.pipeline.board import (
    STUCK,
    EngineState,
    Reporter,
    has_run,
    has_run_on,
    starts_in_a_row,
    wait_while_others_go_on,
)
from hs_ray.pipeline.gate import Gate
from hs_ray.pipeline.metrics import Metrics
from hs_ray.pipeline.resources import check_scratch, engines_of_this_node, fit_ring, node_memory
from hs_ray.plan import read_unit
from hs_ray.schema import Marker, Sample, marker_path
from hs_ray.storage import Storage, when_there_is_room
from hs_ray.writer import ShardWriter, shard_is_whole

START_DEATHS = 3  # of one engine, in a row, before the run ends


@dataclass(frozen=True)
class ActorJob:
    """What an actor needs: plain values, resolved by the driver."""

    storage: Storage
    options: EngineOptions
    model: ModelConfig
    model_digest: str
    fingerprint: str
    epoch: int
    units_per_file: int
    compression: str
    metadata: dict[str, Any]
    min_free_bytes: int
    scratch_bytes: int  # of all shards that one engine makes at once
    max_retries: int
    engines: int
    canary: bool
    prove: str  # capture.prove
    poison: bool = False


class UnitError(Exception):
    """Carries an exception to the driver, as its first argument: Ray Data adds advice of its own to a text.

    Ray Data retries by the text: a disk's or a store's errors may pass, and what is wrong stays wrong. So does the
    failure of a start, which every unit of the actor is told: `UnitError(error, False)`.
    """

    TRANSIENT = "try the unit again"

    def __str__(self) -> str:
        error, *may_pass = self.args
        kind = self.TRANSIENT if isinstance(error, OSError) and all(may_pass) else "the unit failed"
        return f"{kind}: {error}"


class HiddenStateExtractor:
    """`map_batches` UDF: a batch is one unit, the answer is its metadata.

    A constructor that raises would be started again and again, each time with a page of Ray's traces: what kept this
    one from starting is raised by its first unit.
    """

    def __init__(self, job: ActorJob, board: Any):
        self.job = job
        node = ray.util.get_node_ip_address()
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.gate = Gate()
        self.metrics = Metrics(self.name, node)
        self.engine: HiddenStateEngine | None = None
        self._canary_s = 0.0  # busy seconds that no unit's tokens belong to
        self._failure: Exception | None = None
        self._attempts: set[str] = set()  # that this process began; its notes of them may outlive an unwell store
        actor = ray.get_runtime_context().get_actor_id()
        state = EngineState(self.name, node, os.getpid(), detail="loading the model", actor=actor)
        self.reporter = Reporter(board, state, self._refresh)
        try:
            self._check_starts(board, node)
            self.engine = self._prepare(first_here=not has_run_on(board, node))
            board.started.remote(actor, node)
            self.reporter.set("running")
        except EngineStartError as error:
            self._stay_out(error, board, node)
            self._failure = error
        except Exception as error:  # noqa: BLE001  # whatever it is, the driver has to hear of it
            self._failure = error

    def _check_starts(self, board: Any, node: str) -> None:
        """Raises RunError for an engine that keeps dying while it starts, once no other one is left to do the work."""
        deaths_here = starts_in_a_row(board) - 1
        if deaths_here >= START_DEATHS:
            self.reporter.set(STUCK, f"died {deaths_here} times while it started, and is left out")
            wait_while_others_go_on(board)
            raise RunError(
                f"an engine of node {node} died {deaths_here} times in a row while it started; its output, in this "
                f"log and the actor's, says why (out of memory: lower engine.mem_fraction_static, raise "
                f"engine.tp_size)"
            )

    def _stay_out(self, error: EngineStartError, board: Any, node: str) -> None:
        """What a scheduler raises at its start it would raise again, and not on another node: returns once no other
        engine is left to do the work.

        Not where one has run before: then it was the death of that one, which a GPU may need a moment to be free of.
        """
        if has_run_on(board, node) or has_run(board):
            _die(str(error))
        self.reporter.set(STUCK, f"cannot start, and is left out: {str(error):.200}")
        wait_while_others_go_on(board)

    def _prepare(self, first_here: bool) -> HiddenStateEngine:
        options = self._options(first_here)
        if options.device == "cpu":
            cpu.use_cores(self.job.engines * options.tp_size)
        self.reporter.set("starting", "proving the model class where no proof exists")
        prove.ensure(options, self.job.prove)
        self.reporter.set("starting", "loading the model")
        return self._start(options)

    def _start(self, options: EngineOptions) -> HiddenStateEngine:
        engine = HiddenStateEngine(options, on_death=_die, poison=self.job.poison)
        if self.job.canary:
            self.reporter.set("canary")
            canary.check(engine)
            self._canary_s = engine.busy_s
        return engine

    def _options(self, first_here: bool) -> EngineOptions:
        """With the model's folder on this node; its content must be what the driver planned with.

        first_here: no engine of this run has run on this node.
        """
        info = resolve_model(self.job.model)
        if info.digest != self.job.model_digest:
            raise RunError(
                f"model.path = {info.name}: the copy of node {self.reporter.state.node} differs from the driver's"
            )
        options = replace(self.job.options, model_path=local_weights(info))
        neighbours = engines_of_this_node(self.job.engines, options)
        # Of one that is started again the neighbours have taken theirs already.
        engines = neighbours if first_here else 1
        check_scratch(self.job.storage, engines * self.job.scratch_bytes, self.job.min_free_bytes)
        return fit_ring(options, node_memory() // neighbours)

    def _refresh(self, state: EngineState) -> None:
        if self.engine is not None:
            busy_s = self.engine.busy_s - self._canary_s
            self.metrics.busy(busy_s - state.busy_s)
            state.busy_s = busy_s

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        if self._failure is not None:
            raise UnitError(self._failure, False) from self._failure
        try:
            rows = [self._run(int(unit)) for unit in batch["unit"]]
        except Exception as error:
            raise UnitError(error) from error
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _run(self, unit: int) -> dict[str, Any]:
        storage, job = self.job.storage, self.job
        committed = self._committed(unit)  # the actor died after the marker, before Ray heard of it
        if committed is not None:
            return _row(committed)
        died = deaths(storage, unit, job.epoch, self._attempts)
        with self.gate.enter(alone=died >= job.max_retries > 0):
            check_epoch(storage, job.epoch)
            samples = read_unit(storage, unit, job.units_per_file)
            if self.reporter.draining.is_set():
                Event().wait()  # the driver is about to end, and this process with it
            attempt = new_attempt(job.epoch)
            self._attempts.add(attempt)
            when_there_is_room(lambda: begin_attempt(storage, unit, job.epoch, self.name, attempt), self._on_wait)
            self.reporter.begin(unit)
            try:
                if died > job.max_retries:
                    marker = self._set_aside(unit, attempt, samples, died)
                else:
                    marker = self._extract(unit, attempt, samples)
            finally:
                self.reporter.end(unit)
                end_attempt(storage, unit, attempt)
                self._attempts.discard(attempt)
        self.metrics.committed(marker)
        return _row(marker)

    def _committed(self, unit: int) -> Marker | None:
        try:
            marker = Marker.from_json(self.job.storage.read_bytes(marker_path(unit)))
        except FileNotFoundError:
            return None
        ours = marker.fingerprint == self.job.fingerprint and shard_is_whole(self.job.storage, marker)
        return marker if ours else None

    def _writer(self, unit: int, attempt: str) -> ShardWriter:
        job = self.job
        return ShardWriter(
            job.storage,
            unit,
            attempt,
            job.epoch,
            job.options.spec,
            job.compression,
            job.metadata,
            job.fingerprint,
            job.min_free_bytes,
            on_wait=self._on_wait,
        )

    def _extract(self, unit: int, attempt: str, samples: list[Sample]) -> Marker:
        assert self.engine is not None
        started = time.monotonic()
        writer = self._writer(unit, attempt)
        try:
            waited_s = extract_unit(self.engine, writer, samples, self._written)
            marker = writer.commit(self.name, time.monotonic() - started)
        except EngineDiedError:
            # The process is being killed; the note of the attempt must stay, so that the death counts.
            Event().wait()
            raise
        except BaseException:
            writer.discard()
            raise
        self.reporter.waited(waited_s)
        self.metrics.waited(waited_s)
        return marker

    def _set_aside(self, unit: int, attempt: str, samples: list[Sample], died: int) -> Marker:
        writer = self._writer(unit, attempt)
        for sample in samples:
            writer.fail(sample, "engine_died", f"the engine died {died} times with this sample's unit in it")
        return writer.commit(self.name, 0.0)

    def _written(self, tokens: int) -> None:
        self.reporter.written(tokens)
        self.metrics.tokens(tokens)

    def _on_wait(self, reason: str, waited_s: float) -> None:
        self.reporter.set("waiting", reason)
        check_epoch(self.job.storage, self.job.epoch)  # whoever took over must not wait for us, nor we for ever

    def __ray_shutdown__(self) -> None:
        """Graceful end of the actor: SGLang's processes with it."""
        self.reporter.close()
        if self.engine is not None:
            self.engine.close()


def _die(reason: str) -> None:
    """A broken engine: Ray restarts an actor that a signal killed, not one that left by itself."""
    os.kill(os.getpid(), signal.SIGKILL)


def _row(marker: Marker) -> dict[str, Any]:
    """What goes back through Ray: metadata alone."""
    return {"unit": marker.unit, "marker": marker.to_json()}
