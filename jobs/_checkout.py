"""Makes the checkout importable for a job's script, the processes it starts and their children.

`ray job submit --working-dir .` runs a script from a clone on machines where hs_ray is not installed.
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path and (Path(ROOT) / "hs_ray").is_dir():  # not from a wheel, where jobs/ is part of hs_ray
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))
