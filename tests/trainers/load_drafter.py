"""Loads a drafter beside its target in SGLang, on CPU, and writes what each of its parameters sums to.

python load_drafter.py MODEL DRAFTER RESULT.json     # in hs_ray's own environment

SGLang leaves out tensors whose names it does not know, without a word: only the sums show that all are in. Drafting
itself does not run on CPU (SGLang: "EAGLE is not supported in decode attention backend torch_native").
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from hs_ray.engine import cpu, janitor

RESULT = "HS_RAY_TEST_DRAFTER_RESULT"


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler, which tells of the drafter when it is loaded."""
    import sgl_kernel

    sgl_kernel.copy_all_layer_kv_cache_cpu = lambda *args: None  # a drafter's start warms it up
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    load = LlamaForCausalLMEagle3.load_weights

    def told(model: Any, weights: Any) -> Any:
        result = load(model, weights)
        sums = {name: value.double().sum().item() for name, value in model.named_parameters()}
        draft_ids = model.hot_token_id.tolist() if model.hot_token_id is not None else None
        Path(os.environ[RESULT]).write_text(json.dumps({"sums": sums, "draft_ids": draft_ids}))
        return result

    LlamaForCausalLMEagle3.load_weights = told
    return run_scheduler_process(*args, **kwargs)


def start(model: str, drafter: str) -> None:
    cpu.prepare()
    janitor.start(janitor.own_temporary_folder())
    from sglang.srt.entrypoints.engine import Engine

    class Loading(Engine):
        run_scheduler_process_func = staticmethod(scheduler)

    Loading(
        model_path=model,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=drafter,
        speculative_num_steps=2,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        disable_radix_cache=True,
        log_level="error",
    )


def main() -> None:
    model, drafter, result = sys.argv[1:]
    os.environ[RESULT] = result
    engine = multiprocessing.get_context("spawn").Process(target=start, args=(model, drafter))
    engine.start()  # of its own: SGLang kills the process of an engine that does not come up
    engine.join()
    if not Path(result).exists():
        sys.exit("the drafter was not loaded")


if __name__ == "__main__":
    main()
