"""`python -m hs_ray.prove.ship FILE ...`: results of `batch` into hs_ray/engine/proofs.json, and docs/models.md anew.

Only proofs in force are taken: passed, and captured the way the class is captured now.
"""

import sys
from dataclasses import replace
from pathlib import Path

from hs_ray.prove.docs import markdown
from hs_ray.prove.proofs import SHIPPED, add_proofs, read_proofs

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def main() -> None:
    found = [proof for name in sys.argv[1:] for proof in read_proofs(Path(name))]
    taken = [replace(proof, table=[]) for proof in [*read_proofs(), *found] if proof.in_force]
    add_proofs(SHIPPED, taken)
    DOCS.write_text(markdown())
    for proof in found:
        sys.stdout.write(f"{'taken' if proof.in_force else 'LEFT OUT'}: {proof.key}\n")


if __name__ == "__main__":
    main()
