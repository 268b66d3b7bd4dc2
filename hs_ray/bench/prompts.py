"""Random token ids of given lengths."""

import numpy as np
import numpy.typing as npt

Prompts = list[npt.NDArray[np.int32]]


def equal(num_tokens: int, total_tokens: int, vocab_size: int, seed: int) -> Prompts:
    """Prompts of one length, about `total_tokens` in all."""
    rng = np.random.default_rng(seed)
    count = max(1, total_tokens // num_tokens)
    return [rng.integers(0, vocab_size, num_tokens, dtype=np.int32) for _ in range(count)]


def mixed(total_tokens: int, vocab_size: int, longest: int, seed: int) -> Prompts:
    """A chat corpus's lengths: log-normal, median 1,500, cut at `longest`."""
    rng = np.random.default_rng(seed)
    prompts: Prompts = []
    left = total_tokens
    while left > 0:
        length = int(np.clip(rng.lognormal(np.log(1500), 0.9), 16, longest))
        prompts.append(rng.integers(0, vocab_size, length, dtype=np.int32))
        left -= length
    return prompts
