"""Units through Ray Data: one row a unit, one call a unit, several calls at once in each actor."""

import contextlib
import logging
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import ray
import ray.data

from hs_ray.errors import HsRayError
from hs_ray.pipeline.actor import START_DEATHS, ActorJob, HiddenStateExtractor, UnitError
from hs_ray.pipeline.board import new_board
from hs_ray.pipeline.history import History
from hs_ray.pipeline.progress import Progress, Total
from hs_ray.schema import Marker

MOST_BLOCKS = 10_000  # each costs Ray Data a task; beyond this a block is several units
UNIT_RETRIES = 3  # of a unit whose disk or store failed, seconds apart
NO_PROGRESS_S = 24 * 3600  # a full disk is waited for, and is no progress
CLEANUP_S = 20.0


@dataclass(frozen=True)
class Extraction:
    job: ActorJob
    units: list[int]
    total: Total
    gpus: int  # of one engine; 0 on CPU
    at_once: int  # units in one engine
    progress_s: float
    stopping: Event  # set: finish what is in hand, then SIGALRM to this process


def extract_units(extraction: Extraction) -> Generator[Marker]:
    """Run the units and give their markers as they are committed. Ends the engines before it returns.

    Raises the HsRayError or OSError (a disk's, a store's) that an actor raised, or HsRayError with what Ray says.
    """
    _configure()
    board = new_board()
    job, engines = extraction.job, extraction.total.engines
    print(f"hs_ray: starting {engines} engine{'s' if engines > 1 else ''}, loading the model", flush=True)
    progress = Progress(
        extraction.total, board, extraction.progress_s, History(job.storage, job.epoch, engines), extraction.stopping
    )
    try:
        with progress:
            for batch in _dataset(extraction, board).iter_batches(batch_size=None, prefetch_batches=0):
                for text in batch["marker"]:
                    marker = Marker.from_json(text)
                    progress.committed(marker)
                    yield marker
        print(progress.summary(), flush=True)
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise _cause(error) from error
    finally:
        here = ray.util.get_node_ip_address()
        ray.shutdown()
        _wait_for_the_end([state.pid for _, state in progress.states if state.node == here])


def _configure() -> None:
    """Ray Data's own settings: nothing dropped, nothing but our lines printed."""
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    for name in ("exceptions", "_internal.execution.streaming_executor_state"):
        # They say what we say, with the advice to ignore errors or to report them to Ray.
        logging.getLogger(f"ray.data.{name}").setLevel(logging.CRITICAL)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # warns that progress bars are off
    context = ray.data.DataContext.get_current()
    context.max_errored_blocks = 0
    context.raise_original_map_exception = True  # else only the text of an actor's exception arrives
    context.retried_map_errors = [UnitError.TRANSIENT]
    context.max_map_retries = UNIT_RETRIES
    context.max_consecutive_actor_init_deaths = START_DEATHS
    context.actor_init_retry_on_errors = False
    context.execution_no_progress_timeout_s = NO_PROGRESS_S
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _dataset(extraction: Extraction, board: object) -> ray.data.Dataset:
    rows = [{"unit": unit} for unit in extraction.units]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), MOST_BLOCKS))
    pool = ray.data.ActorPoolStrategy(
        size=extraction.total.engines,
        max_concurrent_calls_per_actor=extraction.at_once,
        max_tasks_in_flight_per_actor=extraction.at_once,
        enable_true_multi_threading=True,  # without it a synchronous UDF runs one call at a time
    )
    mapped = dataset.map_batches(
        HiddenStateExtractor,
        batch_size=1,
        compute=pool,
        num_gpus=extraction.gpus or None,
        num_cpus=None if extraction.gpus else 1,
        fn_constructor_args=(extraction.job, board),
    )
    mapped.set_name("hs_ray_extract")
    return mapped


def _cause(error: BaseException) -> HsRayError | OSError:
    """What an actor raised, below Ray's wrappers."""
    inner = getattr(error, "cause", None)
    raised = inner.args[0] if isinstance(inner, UnitError) else inner
    if isinstance(raised, HsRayError | OSError):  # of an unwell disk or store the driver tells
        return raised
    return HsRayError(f"the run failed: {error}; run the same command again to resume")


def _wait_for_the_end(pids: list[int]) -> None:
    """Until the engines of this node and their janitors are gone, so that nothing is left when the job ends."""
    deadline = time.monotonic() + CLEANUP_S
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    """Whether the process or its janitor still runs on this node."""
    if Path(f"/proc/{pid}").exists():
        return True
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if str(pid).encode() in words and any(word.endswith(b"janitor.py") for word in words):
                    return True
    return False
