"""One unit through the engine: its samples submitted in order, their states written in order.

Submitting runs ahead of writing in a thread of its own, as far as the shared memory reaches, and one unit after
the other: units that took turns would all end at once, and the engine would stand still until the next ones
began (measured: 0.82 of the engine's rate). In order, unit k is written while later ones are computed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

from hs_ray.engine.engine import EngineDiedError, HiddenStateEngine, RequestError
from hs_ray.engine.ticket import SampleStates, Ticket
from hs_ray.schema import Sample
from hs_ray.writer import ShardWriter

Progress = Callable[[int], None]  # tokens of a sample that was just written


@dataclass(frozen=True)
class Fault:
    """Why a sample has no states."""

    code: str
    message: str


def extract_unit(
    engine: HiddenStateEngine, writer: ShardWriter, samples: Sequence[Sample], progress: Progress | None = None
) -> float:
    """Fill `writer` with the states of `samples`; a sample that fails twice is recorded as failed there.

    Returns the seconds that submitting waited for shared memory, that is for the writers. Raises CaptureError
    (wrong or missing rows), EngineDiedError, or what the disk raises; the attempt is then worth nothing.
    """
    waited_s = 0.0
    again: list[tuple[Sample, Fault]] = []
    submitted: list[Future[Ticket]] = [Future() for _ in samples]
    feeder = Thread(target=_submit, args=(engine, samples, submitted), name="hs_ray-submit", daemon=True)
    feeder.start()
    try:
        for sample, future in zip(samples, submitted, strict=True):
            ticket = future.result()
            waited_s += ticket.waited_s
            fault = _write(engine, writer, sample, ticket)
            if fault is not None:
                again.append((sample, fault))
            elif progress is not None:
                progress(sample.num_tokens)
    except BaseException:
        _abandon(engine, submitted)
        raise
    # Alone: nothing else of this unit is in the engine any more. Their rows come last in the shard, which verify
    # allows: a row in its planned place would keep all later samples waiting in the ring.
    for sample, _ in again:
        fault = _write(engine, writer, sample, engine.submit(sample.input_ids))
        if fault is not None:
            writer.fail(sample, fault.code, f"{fault.message} (tried twice)")
    return waited_s


def _submit(engine: HiddenStateEngine, samples: Sequence[Sample], submitted: Sequence[Future[Ticket]]) -> None:
    """Submit a whole unit, then let the next one in."""
    with engine.feeding:
        for sample, future in zip(samples, submitted, strict=True):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(engine.submit(sample.input_ids))
            except Exception as error:  # noqa: BLE001  (whatever it is, the writer waits for it)
                future.set_exception(error)


def _write(engine: HiddenStateEngine, writer: ShardWriter, sample: Sample, ticket: Ticket) -> Fault | None:
    try:
        try:
            result = ticket.future.result()
        except EngineDiedError:
            raise
        except RequestError as error:
            return Fault("engine_error", str(error))
        fault = _unusable(writer.spec.columns, result)
        if fault is None:
            writer.add(sample, result.states, result.stats)
        return fault
    finally:
        engine.release(ticket)


def _unusable(columns: Sequence[str], result: SampleStates) -> Fault | None:
    """States that no trainer may see. A zero row is right only in the embeddings (a padding token's)."""
    for name, stats in zip(columns, result.stats, strict=True):
        if stats.nonfinite_rows:
            return Fault("non_finite", f"{name}: {stats.nonfinite_rows} of {stats.rows} tokens hold NaN or Inf")
        if stats.zero_rows and name != "hidden_0":
            return Fault("zero_rows", f"{name}: {stats.zero_rows} of {stats.rows} tokens are all zero")
    return None


def _abandon(engine: HiddenStateEngine, submitted: Sequence[Future[Ticket]]) -> None:
    """After a failure: submit no more, and give back what was submitted and not yet written, once it is through."""
    for future in submitted:
        future.cancel()
    for future in submitted:
        if not future.cancelled() and future.exception() is None:
            ticket = future.result()
            if not ticket.released:
                ticket.future.exception()  # wait: rows may still be on their way into its extent
                engine.release(ticket)
