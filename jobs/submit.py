"""Submit an extraction to a Ray cluster, follow its log, and submit it again while it makes progress.

python jobs/submit.py --address http://head:8265 model=kimi_k25 input.path=s3://b/train.jsonl output.path=s3://b/hs
python jobs/submit.py --runtime-env jobs/runtime_env.yaml ...     # the cluster's image has sglang and ray, no more

Ends with the job's exit code; 2 and 3 are never submitted again. Needs ray[default] and hydra-core here, no GPU.
"""

import sys
from pathlib import Path

import _checkout

from hs_ray.submit.cli import main

if __name__ == "__main__":
    root = Path(_checkout.ROOT)
    sys.exit(main(sys.argv[1:], root if (root / "pyproject.toml").is_file() else None))
