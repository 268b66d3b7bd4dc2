"""A real engine in a process of its own, for tests: it ends every child of its process, and a failed one its parent."""

import json
import multiprocessing
import os
import signal
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hs_ray.engine.canary import Passed, check
from hs_ray.engine.engine import HiddenStateEngine
from hs_ray.engine.entry import SchedulerEntry
from hs_ray.engine.options import EngineOptions
from hs_ray.engine.patching import installed_release
from hs_ray.schema import CaptureSpec, ColumnStats

START_S, RUN_S = 400, 400
ATTENTION = os.environ.get("HS_RAY_TEST_ATTENTION", "triton")  # on a GPU; triton needs no package


@dataclass
class Captured:
    """One prompt's states: uint16 [S, H] a column, and their statistics; or what was raised instead."""

    states: list[np.ndarray]
    stats: list[ColumnStats]
    error: str | None = None


def options_for(folder: Path, layers: tuple[int, ...] | None = None, **changes: Any) -> EngineOptions:
    """Options of an engine for a model folder, on CPU unless `device` says otherwise; all layer ids unless given."""
    config = json.loads((folder / "config.json").read_text())
    n = config["num_hidden_layers"]
    spec = CaptureSpec(layers if layers is not None else tuple(range(n + 1)), "both", n, config["hidden_size"])
    options = EngineOptions(
        spec=spec,
        architecture=config["architectures"][0],
        model_path=str(folder),
        release=installed_release(),
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        max_seq_len=min(2000, config["max_position_embeddings"]),
        device="cpu",
        ring_bytes=2**28,
        chunked_prefill_size=128,
    )
    options = replace(options, **changes)
    if options.device == "cpu":
        return options
    # Several engines of a test share the GPU: a pool no larger than they need.
    pool = {"max_total_tokens": 2 * max(options.max_seq_len, options.chunk)}
    return replace(options, mem_fraction_static=0.5, attention_backend=ATTENTION, args=pool | dict(options.args))


class Failing(SchedulerEntry):
    """The last rank fails while it starts, once its capture is configured: that of rank 0 is connected then."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from hs_ray.engine.capture import Capture

        configure, last = Capture.configure, args[0].tp_size - 1

        def configure_and_fail(capture: Capture, runner: Any) -> None:
            configure(capture, runner)
            if capture.tp_rank == last:
                self.fail()

        with mock.patch.object(Capture, "configure", configure_and_fail):
            return super().__call__(*args, **kwargs)

    def fail(self) -> None:
        raise RuntimeError("there is no room")


class Killed(Failing):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class EngineProcess:
    """`run` prompts that are submitted together; `canary`; `close`. A death is told at once, as in the actor."""

    def __init__(self, options: EngineOptions, entry: type[SchedulerEntry] = SchedulerEntry):
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, options, entry))
        self.process.start()
        child.close()
        try:
            self._take(START_S)
        except BaseException:
            self.process.kill()  # what SGLang began would keep it, and pytest waits for its children at the end
            self.process.join()
            raise

    def run(self, prompts: list[np.ndarray], plug: int = 0) -> list[Captured]:
        """plug: tokens of a prompt that goes first, so that the others queue behind it: the batches are then the
        same ones every time, if it is a multiple of the chunk."""
        first = [np.arange(plug, dtype=np.int32) % 1000] if plug else []
        self.connection.send(("run", first + prompts))
        result: list[Captured] = self._take(RUN_S)
        return result[len(first) :]

    def canary(self) -> Passed:
        self.connection.send(("canary", None))
        passed: Passed = self._take(RUN_S)
        return passed

    def find(self, title: str) -> int:
        """Pid of its child with that title."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [pid for task in tasks for pid in task.read_text().split()]
        (found,) = [pid for pid in children if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(found)

    def close(self) -> None:
        self.connection.send(("close", None))
        self.process.join(60)

    def _take(self, seconds: float) -> Any:
        if not self.connection.poll(seconds):
            raise TimeoutError("the engine's process did not answer")
        answer = self.connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(connection: Connection, options: EngineOptions, entry: type[SchedulerEntry]) -> None:
    def on_death(reason: str) -> None:
        connection.send(f"EngineDiedError: {reason}")

    try:
        with mock.patch("hs_ray.engine.engine.SchedulerEntry", entry):
            engine = HiddenStateEngine(options, on_death, poison=True)
        connection.send({})
        while True:
            what, prompts = connection.recv()
            if what == "close":
                engine.close()
                return
            connection.send(check(engine) if what == "canary" else _run(engine, prompts))
    except BaseException:  # noqa: BLE001  (told to the test, which raises it)
        connection.send(traceback.format_exc())


def _run(engine: HiddenStateEngine, prompts: list[np.ndarray]) -> list[Captured]:
    results = []
    with ThreadPoolExecutor(1) as feeder:  # the prompts may need more shared memory than there is
        for submitted in [feeder.submit(engine.submit, prompt) for prompt in prompts]:
            ticket = submitted.result(RUN_S)
            try:
                states = ticket.future.result(RUN_S)
                results.append(Captured([state.copy() for state in states.states], states.stats))
            except Exception as error:  # noqa: BLE001  (what the test asks about)
                results.append(Captured([], [], f"{type(error).__name__}: {error}"))
            engine.release(ticket)
    return results
