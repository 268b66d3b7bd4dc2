"""SGLang on a machine without a GPU: a first-class device for development, tests and the demo."""

import os
import sys
from pathlib import Path

STUB = str(Path(__file__).parent / "cpu_stub")


def prepare(tp_size: int = 1) -> None:
    """Set up this process and its children; call before sglang is imported.

    SGLang takes its CPU path only with SGLANG_USE_CPU_ENGINE, and imports `sgl_kernel`, whose wheel needs
    libcuda: the stand-in goes ahead of it.
    """
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # A torch with NCCL in it would try to start it for tensor parallel ranks, though they talk through gloo.
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent")
    if tp_size > 1:  # SGLang gives each rank a NUMA node, or what is said here: the cores of each
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::tp_size] or [cores[rank % len(cores)]] for rank in range(tp_size)]
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))
    if STUB not in sys.path:
        sys.path.insert(0, STUB)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != STUB]
    os.environ["PYTHONPATH"] = os.pathsep.join([STUB, *paths])


def use_cores(ranks: int) -> None:
    """Give a rank its share of this machine's cores. Ray would give it one: an actor reserves one CPU.

    ranks: SGLang's processes of all engines that may share the machine. Call before one is started.
    """
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
