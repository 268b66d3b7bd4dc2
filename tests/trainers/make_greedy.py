"""Writes greedy.jsonl: eight questions and what SmolLM2 answers greedily, as token ids. Its result is committed.

    .venv/bin/python tests/trainers/make_greedy.py      # minutes on a CPU

Greedy answers test a final state without a reference: the head over the state at t must choose token t + 1.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hs_ray.builtin_models import builtin_folder

ANSWER_TOKENS = 48
QUESTIONS = [
    "What is the capital of France, and which river runs through it?",
    "Explain in two sentences why the sky is blue.",
    "List three fruits that are yellow.",
    "Write a Python function that returns the sum of a list of numbers.",
    "Translate 'good morning' into Spanish.",
    "Who wrote the play Romeo and Juliet?",
    "How do plants make their food?",
    "Give me a short tip for learning a new language.",
]


@torch.no_grad()
def main() -> None:
    folder = builtin_folder("builtin:smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    lines = []
    for number, question in enumerate(QUESTIONS):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=ANSWER_TOKENS)[0].tolist()
        mask = [0] * len(prompt) + [1] * (len(whole) - len(prompt))
        lines.append(json.dumps({"id": f"greedy-{number}", "input_ids": whole, "loss_mask": mask}))
        print(
            f"{len(prompt)} + {len(whole) - len(prompt)} tokens: {tokenizer.decode(whole[len(prompt) :])!r}", flush=True
        )
    (Path(__file__).parent / "greedy.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
