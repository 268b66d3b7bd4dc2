"""The yardstick: SGLang as it comes, with our arguments, nothing patched and nothing captured."""

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hs_ray.engine import cpu, janitor
from hs_ray.engine.options import EngineOptions, server_args, set_environment


class BareEngine:
    def __init__(self, options: EngineOptions):
        if options.device == "cpu":
            cpu.prepare(options.tp_size)
        janitor.start()  # SGLang leaves files in /dev/shm, at a clean end too
        set_environment()
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(**server_args(options))
        self._loop = asyncio.new_event_loop()

    def prefill(self, prompts: Sequence[npt.NDArray[np.int32]]) -> None:
        """Compute all prompts; returns when the last one is answered."""

        async def everything() -> None:
            sampling = {"max_new_tokens": 0}
            await asyncio.gather(
                *(self._engine.async_generate(input_ids=p.tolist(), sampling_params=sampling) for p in prompts)
            )

        self._loop.run_until_complete(everything())

    def close(self) -> None:
        self._engine.shutdown()
