"""What the engine itself thinks of the samples' next tokens, for `verify.reference=argmax`.

SGLang runs as it comes, nothing patched and nothing captured, in a process of its own: it ends that process when it
cannot start.
"""

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import numpy.typing as npt

from hs_ray.engine.bare import BareEngine
from hs_ray.engine.options import EngineOptions
from hs_ray.engine.patching import installed_release
from hs_ray.errors import RunError
from hs_ray.schema import CaptureSpec


def engine_logprobs(
    run: Mapping[str, Any], spec: CaptureSpec, folder: str, device: str, prompts: Sequence[npt.NDArray[np.int32]]
) -> list[npt.NDArray[np.float32]]:
    """log p(ids[t + 1] | ids[: t + 1]) of each prompt int32 [S] -> float32 [S - 1], in nats.

    run: run.json, for the model and the engine's keys; folder: the model's weights; device: cpu or cuda. Raises
    UnsupportedError without SGLang, RunError if it does not come up.
    """
    model, config = run["model"], run["config"]
    engine = config["engine"]
    options = EngineOptions(
        spec=spec,
        architecture=model["architecture"],
        model_path=folder,
        release=installed_release(),
        vocab_size=model["vocab_size"],
        context_length=model["context_length"],
        max_seq_len=config["max_seq_len"],
        device=device,
        ring_bytes=0,
        tp_size=engine["tp_size"] if device == "cuda" else 1,
        trust_remote_code=config["model"]["trust_remote_code"],
        chunked_prefill_size=engine["chunked_prefill_size"],
        mem_fraction_static=engine["mem_fraction_static"],
        attention_backend=engine["attention_backend"] if device == "cuda" else None,
        args=engine["args"],
    )
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_logprobs, options, prompts).result()
    except BrokenProcessPool as error:
        raise RunError(
            "verify.logprobs = true: SGLang did not come up (its own message is above); "
            "verify.logprobs=false compares without it"
        ) from error


def _logprobs(options: EngineOptions, prompts: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
    engine = BareEngine(options)
    try:
        return engine.logprobs(prompts)
    finally:
        engine.close()
