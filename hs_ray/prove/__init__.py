"""Proof that a model class's states are right, before an engine is trusted with it.

    ensure     before an engine starts: use the proof there is, or make it
    prove      one proof, in a process of its own
    check      on the driver: is the class known at all

    twin       a small random model of the same class and options
    reference  transformers' states of it
    compare    relative errors, and what passes
    measure    twin -> transformers -> SGLang with capture -> comparison
    proofs     engine/proofs.json and the user's cache
    quirks     what twins need so that SGLang runs them on this device
    shapes     config.json of known classes, for batch
    batch      `python -m hs_ray.prove.batch llama qwen3 ...`: several classes, results to one file
    ship       results of batch into engine/proofs.json, and docs/models.md anew
    docs       docs/models.md, from the proofs

Importing this package imports neither torch nor sglang.
"""

from hs_ray.prove.request import request_for
from hs_ray.prove.run import ProofError, check, ensure, keep, prove

__all__ = ["ProofError", "check", "ensure", "keep", "prove", "request_for"]
