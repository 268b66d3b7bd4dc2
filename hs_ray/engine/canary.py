"""The check before the first unit, on every engine: short, long, split at different places, repeated.

Equal work must give equal bits; the same tokens in other company must agree to bf16 noise. A missing or
foreign row, a stale page or a shifted offset is off by about 1.
"""

import numpy as np
import numpy.typing as npt

from hs_ray.engine.engine import HiddenStateEngine, SampleStates
from hs_ray.engine.options import EngineOptions
from hs_ray.errors import CanaryError

TOLERANCE = 0.05  # relative error of a column; up to 0.01 was measured between batchings of dense models
SHORT = 7
LONGEST = {"cpu": 512, "cuda": 4096}  # tokens; on two cores a long prompt takes as long as a small job


def relative_error(ours: npt.NDArray[np.uint16], reference: npt.NDArray[np.uint16]) -> float:
    """||ours - reference|| / ||reference|| of two bf16 arrays given by their bits."""
    a, b = as_float32(ours), as_float32(reference)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def as_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bf16 bits -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def check(engine: HiddenStateEngine, seed: int = 0) -> dict[str, float]:
    """Run the canary. Returns the largest relative error by comparison; raises CanaryError."""
    options = engine.options
    most = LONGEST[options.device]
    chunk = options.chunk if options.chunk > 0 else most
    longest = min(options.max_seq_len, max(2 * chunk + 9, 16), most)
    rng = np.random.default_rng(seed)
    long = rng.integers(0, options.vocab_size, longest, dtype=np.int32)
    short = rng.integers(0, options.vocab_size, min(SHORT, options.max_seq_len), dtype=np.int32)
    prefix = long[: max(1, min(chunk, longest) - 3)]

    first = _states(engine, [short])[0]
    if any(not np.array_equal(a, b) for a, b in zip(first, _states(engine, [short])[0], strict=True)):
        raise CanaryError("canary: one prompt alone, sent twice, gave different bits")
    alone = _states(engine, [long])[0]
    # Fillers go first and use up part of the chunk, so that the long prompt is split, at another token each time.
    first_company, second_company = (_fillers(rng, options, chunk, longest, share) for share in (2, 3))
    mixed = _states(engine, [*first_company, short, long])
    again = _states(engine, [*second_company, long, short])
    part = _states(engine, [prefix])[0]
    compared = {
        "long prompt in other company": _largest(mixed[-1], alone),
        "long prompt in yet other company": _largest(again[-2], alone),
        "short prompt in other company": max(_largest(mixed[-2], first), _largest(again[-1], first)),
        "first tokens alone": _largest(part, [column[: len(prefix)] for column in alone]),
    }
    wrong = [f"{name}: relative error {error:.3f}" for name, error in compared.items() if not error <= TOLERANCE]
    if wrong:
        raise CanaryError(
            f"canary: states depend on what else is in the batch (at most {TOLERANCE}): {'; '.join(wrong)}"
        )
    return compared


def _fillers(
    rng: np.random.Generator, options: EngineOptions, chunk: int, longest: int, share: int
) -> list[npt.NDArray[np.int32]]:
    """Two prompts that leave room in a chunk for 1 / share of the long prompt (of the chunk, if that is shorter)."""
    room = max(2, chunk - longest // share if longest <= chunk else chunk // share)
    lengths = (room // 2, room - room // 2)
    return [
        rng.integers(0, options.vocab_size, max(1, min(options.max_seq_len, length)), dtype=np.int32)
        for length in lengths
    ]


def _states(engine: HiddenStateEngine, prompts: list[npt.NDArray[np.int32]]) -> list[list[npt.NDArray[np.uint16]]]:
    """Copies of the states of prompts that are sent together."""
    tickets = [engine.submit(prompt) for prompt in prompts]
    results = []
    for ticket, prompt in zip(tickets, prompts, strict=True):
        sample: SampleStates = ticket.future.result(timeout=1800)
        for name, stats in zip(engine.options.spec.columns, sample.stats, strict=True):
            # Some models' embedding of a special token is zero; after a layer no row is.
            if stats.nonfinite_rows or (stats.zero_rows and name != "hidden_0"):
                raise CanaryError(
                    f"canary: {name} of a prompt of {len(prompt)} random tokens has {stats.nonfinite_rows} rows "
                    f"with NaN or Inf and {stats.zero_rows} rows of zeros"
                )
        results.append([state.copy() for state in sample.states])
        engine.release(ticket)
    return results


def _largest(ours: list[npt.NDArray[np.uint16]], reference: list[npt.NDArray[np.uint16]]) -> float:
    return max(relative_error(a, b) for a, b in zip(ours, reference, strict=True))
