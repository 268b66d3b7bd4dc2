"""Prove a model class here: a small random twin of the model through SGLang with capture, and through transformers.

python jobs/prove.py model.path=Qwen/Qwen3-8B
python jobs/prove.py model=kimi_k25 engine.tp_size=8

Prints the error of every layer id. A proof that passed is kept in the user's cache, where capture.prove=auto finds
it. Exit code 1 if the states are not those of transformers.
"""

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import ProveJob, run_job
from hs_ray.engine.arguments import check_arguments
from hs_ray.engine.patching import check_installed
from hs_ray.model import resolve_model
from hs_ray.prove import keep, prove, request_for


def main(job: ProveJob) -> int:
    release = check_installed().release
    check_arguments(job.engine.args)
    request = request_for(job, resolve_model(job.model), release)
    print(f"hs_ray: proving {request.key}, a minute or more", flush=True)
    proof = prove(request, job.prove.limit_seconds)
    print("\n".join([f"{proof.key}, captured by: {proof.how}", *proof.table]), flush=True)
    if not proof.ok:
        print("WRONG: these are not the states of transformers; this class must not be used here")
        return 1
    print(f"ok, kept in {keep(proof)}")
    return 0


if __name__ == "__main__":
    run_job(ProveJob, "prove", main)
