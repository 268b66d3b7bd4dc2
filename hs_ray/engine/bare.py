"""The yardstick: SGLang as it comes, with our arguments, nothing patched and nothing captured."""

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hs_ray.engine import cpu, janitor
from hs_ray.engine.options import EngineOptions, server_args, set_environment


class BareEngine:
    def __init__(self, options: EngineOptions):
        if options.device == "cpu":
            cpu.prepare(options.tp_size)
        janitor.start(janitor.own_temporary_folder())  # SGLang leaves files behind, at a clean end too
        set_environment()
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(**server_args(options))
        gc.freeze()  # as the engine that is measured against it
        self._loop = asyncio.new_event_loop()

    def prefill(self, prompts: Sequence[npt.NDArray[np.int32]]) -> None:
        """Compute all prompts; returns when the last one is answered."""
        self._run(prompts)

    def logprobs(self, prompts: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """log p(ids[t + 1] | ids[: t + 1]) of each prompt int32 [S] -> float32 [S - 1], in nats."""
        answers = self._run(prompts, return_logprob=True, logprob_start_len=0)
        found = [answer["meta_info"]["input_token_logprobs"][1:] for answer in answers]  # of the first there is none
        return [np.array([value for value, *_ in tokens], dtype=np.float32) for tokens in found]

    def _run(self, prompts: Sequence[npt.NDArray[np.int32]], **wanted: Any) -> list[Any]:
        async def everything() -> list[Any]:
            keys = {"sampling_params": {"max_new_tokens": 0}, **wanted}
            return await asyncio.gather(
                *(self._engine.async_generate(input_ids=prompt.tolist(), **keys) for prompt in prompts)
            )

        return self._loop.run_until_complete(everything())

    def close(self) -> None:
        self._engine.shutdown()
