"""The check before the first unit, on every engine: short, long, split at different places, repeated.

Equal work must give equal bits; the same tokens in other company must agree to bf16 noise. A missing or
foreign row, a stale page or a shifted offset is off by about 1.
"""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hs_ray.engine.engine import HiddenStateEngine
from hs_ray.engine.ring import ALIGN
from hs_ray.engine.ticket import SampleStates, Ticket
from hs_ray.errors import CanaryError

log = logging.getLogger(__name__)

TOLERANCE = 0.05  # relative error of a column; up to 0.01 was measured between batchings of dense models
SHORT = 7
LONGEST = {"cpu": 512, "cuda": 4096}  # tokens; on two cores a long prompt takes as long as a small job
SHARES = (2, 3)  # the long prompt is split after a half and after a third of it
PLUGS = (64, 512, 4096)  # tokens of a prompt that keeps the engine busy while the others queue up behind it

Prompt = npt.NDArray[np.int32]
States = list[npt.NDArray[np.uint16]]


def relative_error(ours: npt.NDArray[np.uint16], reference: npt.NDArray[np.uint16]) -> float:
    """||ours - reference|| / ||reference|| of two bf16 arrays given by their bits."""
    a, b = as_float32(ours), as_float32(reference)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def as_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bf16 bits -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Answer:
    states: States
    parts: list[int]  # tokens of each forward pass that the prompt was split into


@dataclass(frozen=True)
class Passed:
    errors: dict[str, float]  # the largest relative error of a column, by comparison
    parts: list[list[int]]  # of the long prompt: alone, in company, in yet other company


def check(engine: HiddenStateEngine, seed: int = 0) -> Passed:
    """Run the canary. Raises CanaryError."""
    options = engine.options
    rng = np.random.default_rng(seed)
    long, short = (_prompt(rng, engine, length) for length in _lengths(engine))
    prefix = long[: max(1, (min(options.chunk, len(long)) if options.chunk > 0 else len(long)) - 3)]

    first, repeated = (_run(engine, [short])[0].states for _ in range(2))
    if any(not np.array_equal(a, b) for a, b in zip(first, repeated, strict=True)):
        raise CanaryError("canary: one prompt alone, sent twice, gave different bits")
    alone = _run(engine, [long])[0]
    mixed, again = (_in_company(engine, rng, long, short, share, alone.parts) for share in SHARES)
    part = _run(engine, [prefix])[0].states
    compared = {
        "long prompt in other company": _largest(mixed[1].states, alone.states),
        "long prompt in yet other company": _largest(again[1].states, alone.states),
        "short prompt in other company": max(_largest(answers[0].states, first) for answers in (mixed, again)),
        "first tokens alone": _largest(part, [column[: len(prefix)] for column in alone.states]),
    }
    wrong = [f"{name}: relative error {error:.3f}" for name, error in compared.items() if not error <= TOLERANCE]
    if wrong:
        raise CanaryError(
            f"canary: states depend on what else is in the batch (at most {TOLERANCE}): {'; '.join(wrong)}"
        )
    return Passed(compared, [alone.parts, mixed[1].parts, again[1].parts])


def _lengths(engine: HiddenStateEngine) -> tuple[int, int]:
    """Tokens of the long and the short prompt: SGLang takes them, and shared memory holds both at once behind a plug.

    The long one is shorter still where company fits only then: one that is never split proves less.
    """
    options, most = engine.options, _most(engine)
    room = max(4, (engine.ring.size - 3 * ALIGN) // options.spec.bytes_per_token)  # each of the three ends in a page
    short = min(SHORT, most, room // 4)
    long = min(most, LONGEST[options.device], max(room // 2, room - short - PLUGS[0]))
    if options.chunk > 0:
        long = min(long, max(2 * options.chunk + 9, 16))
    for length in (long, long // 2, long // 4):
        if length > SHORT and all(_company(engine, length, short, share) for share in SHARES):
            return length, short
    return long, short


def _most(engine: HiddenStateEngine) -> int:
    """Tokens of the longest prompt that the engine takes."""
    return min(engine.options.max_seq_len, engine.longest_request)


def _in_company(
    engine: HiddenStateEngine, rng: np.random.Generator, long: Prompt, short: Prompt, share: int, alone: list[int]
) -> list[Answer]:
    """(short, long), sent behind prompts that leave room in the chunk for 1 / share of the long one.

    They share a forward pass only if they wait for it together, so another prompt keeps the engine busy meanwhile: a
    longer one where that one was through too soon. alone: the parts of the long prompt when it was sent alone.
    """
    company = _company(engine, len(long), len(short), share)
    before = [[min(plug, _most(engine)), *company] for plug in PLUGS]
    fitting = [lengths for lengths in before if _fits(engine, [*lengths, len(short), len(long)])]
    for lengths in fitting or [[]]:
        answers = _run(engine, [*(_prompt(rng, engine, length) for length in lengths), short, long])[-2:]
        if not company or answers[1].parts != alone:
            return answers
    log.warning("canary: the prompt of %d tokens was never split after 1/%d of it", len(long), share)
    return answers


def _company(engine: HiddenStateEngine, long: int, short: int, share: int) -> list[int]:
    """Tokens of at least two prompts; none where chunks are off, or shared memory holds too few to fill one."""
    chunk, most = engine.options.chunk, _most(engine)
    fill = chunk - min(long, chunk) // share - short
    if fill < 2:
        return []
    each = min(most, -(-fill // 2))
    lengths = [min(each, fill - first) for first in range(0, fill, each)]
    return lengths if _fits(engine, [min(PLUGS[0], most), *lengths, short, long]) else []


def _fits(engine: HiddenStateEngine, lengths: list[int]) -> bool:
    """Whether shared memory, which is given out by the page, holds prompts of so many tokens at once."""
    pages = sum(-(-length * engine.options.spec.bytes_per_token // ALIGN) for length in lengths)
    return pages * ALIGN <= engine.ring.size


def _prompt(rng: np.random.Generator, engine: HiddenStateEngine, length: int) -> Prompt:
    return rng.integers(0, engine.options.vocab_size, length, dtype=np.int32)


def _run(engine: HiddenStateEngine, prompts: list[Prompt]) -> list[Answer]:
    """What comes of prompts that are sent together, as many as fit: no other hand would make room for the rest."""
    answers: list[Answer] = []
    lot: list[Prompt] = []
    for prompt in prompts:
        if lot and not _fits(engine, [len(other) for other in [*lot, prompt]]):
            answers += _run_lot(engine, lot)
            lot = []
        lot.append(prompt)
    return answers + _run_lot(engine, lot)


def _run_lot(engine: HiddenStateEngine, prompts: list[Prompt]) -> list[Answer]:
    """The states are copies: their shared memory is free again."""
    tickets: list[Ticket] = [engine.submit(prompt) for prompt in prompts]
    answers = []
    for ticket, prompt in zip(tickets, prompts, strict=True):
        sample: SampleStates = ticket.future.result(timeout=1800)
        for name, stats in zip(engine.options.spec.columns, sample.stats, strict=True):
            # Some models' embedding of a special token is zero; after a layer no row is.
            if stats.nonfinite_rows or (stats.zero_rows and name != "hidden_0"):
                raise CanaryError(
                    f"canary: {name} of a prompt of {len(prompt)} random tokens has {stats.nonfinite_rows} rows "
                    f"with NaN or Inf and {stats.zero_rows} rows of zeros"
                )
        answers.append(Answer([state.copy() for state in sample.states], ticket.parts))
        engine.release(ticket)
    return answers


def _largest(ours: States, reference: States) -> float:
    return max(relative_error(a, b) for a, b in zip(ours, reference, strict=True))
