"""SmolLM2 answers made-up questions; questions and answers become an input of jobs/extract.py.

    python tests/probe/answers.py MODEL RESULT.jsonl --number 6000 [--held-out] [--device cuda]

A drafter learns to continue what its target writes: the answers must be the target's own. They are sampled, because a
small model's greedy answers run in circles and would be too easy to guess.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from prompts import questions

from hs_ray.engine import cpu, janitor

SAMPLING = {"temperature": 0.7}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("result", type=Path)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--tokens", type=int, default=384, help="of an answer, at most")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    prompts = chats(given.model, questions(given.number, given.held_out))
    engine = start(given.model, given.device, max_running_requests=8 if given.device == "cpu" else 2048)
    answers = engine.generate(input_ids=prompts, sampling_params=SAMPLING | {"max_new_tokens": given.tokens})
    engine.shutdown()
    kind = "held" if given.held_out else "train"
    lines = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        written = list(answer["output_ids"])
        mask = [0] * len(prompt) + [1] * len(written)
        lines.append(json.dumps({"id": f"{kind}-{number}", "input_ids": prompt + written, "loss_mask": mask}))
    given.result.write_text("\n".join(lines) + "\n")
    written_tokens = sum(len(answer["output_ids"]) for answer in answers)
    print(f"{len(lines):,} samples, {written_tokens:,} tokens of answers", flush=True)


def chats(model: str, asked: list[str]) -> list[list[int]]:
    """The token ids of each question as a chat, up to where the answer begins."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found: list[list[int]] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in asked
    ]
    return found


def start(model: str, device: str, **more: Any) -> Any:
    """SGLang as it comes, unpatched, without CUDA graphs and tokenizer."""
    on_cpu = {"attention_backend": "torch_native", "mem_fraction_static": 0.1, "max_total_tokens": 8192}
    # A share of the memory would be of what others have left at that moment: others run on the same GPU.
    on_cuda = {"attention_backend": "triton", "mem_fraction_static": 0.9, "max_total_tokens": 1_000_000}
    if device == "cpu":
        cpu.prepare()
    janitor.start(janitor.own_temporary_folder())
    from sglang.srt.entrypoints.engine import Engine

    return Engine(
        model_path=model,
        device=device,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        log_level="error",
        **((on_cpu if device == "cpu" else on_cuda) | more),
    )


if __name__ == "__main__":
    sys.exit(main())
