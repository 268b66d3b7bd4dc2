"""Made-up inputs of any size: pre-tokenized samples and chats, written line by line.

    python -m hs_ray.bench.corpus FILE SAMPLES TOKENS VOCAB LONGEST

writes SAMPLES pre-tokenized samples of TOKENS tokens in all, their lengths as in a chat corpus: log-normal, cut at
LONGEST. That is how the estimate of a large run is tried without its data (docs/planning.md).
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from hs_ray.config import data_path

SPREAD = 0.9  # sigma of the log-normal
SHORTEST = 16
LEARNED = 0.6  # of a sample's tokens: the last ones


def chat_lengths(samples: int, tokens: int, longest: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """`samples` lengths that add up to `tokens`: log-normal, from SHORTEST to `longest`."""
    if not SHORTEST * samples <= tokens <= longest * samples:
        raise ValueError(f"{samples} samples of {SHORTEST} to {longest} tokens cannot have {tokens} in all")
    shape = np.random.default_rng(seed).lognormal(0, SPREAD, samples)
    low, high = 0.0, float(tokens)  # of the scale that gives the sum, with what lies outside the limits cut off
    for _ in range(100):
        scale = (low + high) / 2
        lengths = np.clip(shape * scale, SHORTEST, longest).astype(np.int64)
        low, high = (scale, high) if lengths.sum() < tokens else (low, scale)
    while missing := tokens - int(lengths.sum()):
        step = 1 if missing > 0 else -1
        room = np.flatnonzero(lengths < longest if step > 0 else lengths > SHORTEST)[: abs(missing)]
        lengths[room] += step
    return lengths


def write_tokens(path: Path, lengths: Iterable[int], vocab_size: int, seed: int = 0) -> None:
    """One pre-tokenized sample a line, with id and loss mask: about 8 bytes a token."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for number, length in enumerate(lengths):
            mask = (np.arange(length) >= length * (1 - LEARNED)).astype(np.uint8)
            ids = rng.integers(0, vocab_size, length, dtype=np.int32)
            sample = {"id": f"sample-{number}", "input_ids": ids, "loss_mask": mask}
            file.write(orjson.dumps(sample, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


def write_chats(path: Path, samples: int, seed: int = 0) -> None:
    """One conversation a line: one to four turns, words of the demo's samples in any order."""
    rng = np.random.default_rng(seed)
    words = np.array(_words())

    def text(median: float) -> str:
        return " ".join(rng.choice(words, int(np.clip(rng.lognormal(np.log(median), 0.7), 3, 2000))))

    with path.open("wb") as file:
        for number in range(samples):
            messages = [{"role": "system", "content": text(12)}]
            for _ in range(rng.integers(1, 5)):
                messages += [{"role": "user", "content": text(30)}, {"role": "assistant", "content": text(120)}]
            file.write(orjson.dumps({"id": f"chat-{number}", "messages": messages}, option=orjson.OPT_APPEND_NEWLINE))


def _words() -> list[str]:
    return [word for record in _demo() for message in record["messages"] for word in message["content"].split()]


def _demo() -> Iterator[dict[str, Any]]:
    for line in (data_path("demo") / "samples.jsonl").read_bytes().splitlines():
        yield json.loads(line)


if __name__ == "__main__":
    target, (samples, tokens, vocab, longest) = Path(sys.argv[1]), map(int, sys.argv[2:])
    write_tokens(target, chat_lengths(samples, tokens, longest).tolist(), vocab)
