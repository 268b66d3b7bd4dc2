"""`python -m hs_ray.prove.batch llama qwen3 ... --out proofs.json`: several classes, one after another.

No hub and no model folder is needed: configs are those of `shapes`. Each runs in a process of its own with a time
limit, `--jobs` of them at once; one that fails does not stop the others. What came out, passed or not, goes to --out;
`--keep` puts only what passed there (so it can be hs_ray/engine/proofs.json). Exit code 1 if any did not pass.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from hs_ray.engine.patching import installed_release
from hs_ray.errors import HsRayError
from hs_ray.prove.proofs import Proof, add_proofs
from hs_ray.prove.request import Request
from hs_ray.prove.run import prove
from hs_ray.prove.shapes import SHAPES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hs_ray.prove.batch", description=__doc__.split("\n\n")[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)}; none: all")
    parser.add_argument("--out", type=Path, help="JSON file that results are added to")
    parser.add_argument("--keep", action="store_true", help="add only proofs that passed")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--attention-backend", help="SGLang's choice if left out, torch_native on CPU")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="for each class")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="proofs at once, all on the same devices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=JSON", help="another SGLang server argument"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    unknown = [name for name in given.names if name not in SHAPES]
    if unknown:
        say(f"unknown: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
        return 2
    extra: dict[str, Any] = {}
    for pair in given.arg:
        name, _, value = pair.partition("=")
        extra[name] = json.loads(value)
    names = given.names or list(SHAPES)
    failed = []
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(_one, name, _request(name, given, extra), given.limit): name for name in names}
        for future in as_completed(running):
            proof = future.result()
            if proof is None or not proof.ok:
                failed.append(running[future])
            if proof is not None and given.out and (proof.ok or not given.keep):
                add_proofs(given.out, [proof])
    say(f"not passed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def _request(name: str, given: argparse.Namespace, extra: dict[str, Any]) -> Request:
    return Request(
        config=SHAPES[name],
        release=installed_release(),
        device=given.device,
        tp_size=given.tp_size,
        attention_backend=given.attention_backend,
        seed=given.seed,
        args=extra,
    )


def _one(name: str, request: Request, limit_s: float) -> Proof | None:
    started = time.monotonic()
    try:
        proof = prove(request, limit_s)
    except HsRayError as error:
        say(f"== {name}: {request.key}: {time.monotonic() - started:.0f} s: NOT RUN\n{error}")
        return None
    verdict = "ok" if proof.ok else "WRONG"
    say("\n".join([f"== {name}: {proof.key}: {proof.how}: {proof.seconds:.0f} s: {verdict}", *proof.table]))
    return proof


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
