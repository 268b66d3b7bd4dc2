"""`python -m hs_ray.prove.worker REQUEST RESULT`: one proof; both are JSON files. Leaves by the engine's own end."""

import sys
from pathlib import Path


def main() -> None:
    # Imported here, since SGLang's spawned processes import this module as their main.
    from hs_ray.errors import HsRayError
    from hs_ray.prove.measure import measure
    from hs_ray.prove.proofs import add_proofs
    from hs_ray.prove.request import Request

    request, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        proof = measure(Request.from_json(request.read_text()))
    except HsRayError as error:
        result.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)
    add_proofs(result, [proof])


if __name__ == "__main__":
    main()
