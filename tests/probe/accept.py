"""How many tokens a drafter saves: SGLang runs it for its target on held-out questions, on a GPU.

    python tests/probe/accept.py MODEL DRAFTER HELD_OUT.jsonl RESULT.json

Greedy; accepted length = tokens written / passes of the target, 1 for a drafter that is always wrong.
"""

import json
import sys
from pathlib import Path

from answers import start

ANSWER_TOKENS = 256
DRAFT_STEPS = 3


def main() -> None:
    model, drafter, held_out, result = sys.argv[1:]
    lines = [json.loads(line) for line in Path(held_out).read_text().splitlines()]
    prompts = [line["input_ids"][: line["loss_mask"].index(1)] for line in lines]
    engine = start(
        model,
        "cuda",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=drafter,
        speculative_num_steps=DRAFT_STEPS,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=DRAFT_STEPS + 1,
        max_running_requests=64,
        max_total_tokens=65_536,
        disable_radix_cache=True,
    )
    greedy = {"temperature": 0.0, "max_new_tokens": ANSWER_TOKENS}
    answers = engine.generate(input_ids=prompts, sampling_params=greedy)
    engine.shutdown()
    written = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    found = {"questions": len(answers), "tokens": written, "passes": passes, "accepted_length": written / passes}
    Path(result).write_text(json.dumps(found))
    print(found, flush=True)


if __name__ == "__main__":
    main()
