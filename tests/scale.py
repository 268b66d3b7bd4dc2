"""Scale by simulation: python tests/scale.py UNITS FOLDER

The real driver, Ray Data, plan, writers, markers and manifest over UNITS units of one small sample each, with an engine
that takes no time (tests/faults/scripted.py). The driver is killed at half, resumed, and run once more at the end.
Prints, for each start, how long what took, the driver's largest memory, and the rate.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LOOK_S = 0.5


@dataclass
class Start:
    """What one start of the driver took."""

    name: str
    before_s: float  # until a unit more is committed, or the end
    whole_s: float
    units: int  # committed by this start
    driver_bytes: int

    def __str__(self) -> str:
        busy = self.whole_s - self.before_s
        rate = f"{self.units / busy:.0f} units/s, {1000 * busy / self.units:.1f} s a thousand" if self.units else ""
        return (
            f"{self.name}: {self.units:,} units in {self.whole_s:.0f} s, the first after {self.before_s:.0f} s; "
            f"driver {self.driver_bytes / 1e6:,.0f} MB; {rate}"
        )


def write_input(path: Path, units: int) -> None:
    with path.open("w") as file:
        for number in range(units):
            file.write(json.dumps({"id": number, "input_ids": [number % 49000, number // 49000, 7, 9]}) + "\n")


def run(name: str, folder: Path, kill_at: int | None) -> Start:
    words = [
        "cluster.address=local",
        "model=tiny_random",
        f"input.path={folder}/in.jsonl",
        f"output.path={folder}/out",
        "output.shard_bytes=4KB",
        "output.min_free_bytes=1MB",
        "capture.canary=false",
        "capture.prove=never",
        "engine.device=cpu",
        "cluster.lease_seconds=20",
        "cluster.progress_seconds=30",
    ]
    done = folder / "out/_run/done"
    before = count(done)
    started, first, memory = time.monotonic(), 0.0, 0
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(HERE / "faults")}
    process = subprocess.Popen([sys.executable, str(HERE / "faults/scripted.py"), *words], env=environment)
    while process.poll() is None:
        time.sleep(LOOK_S if not first else 5 * LOOK_S)
        memory = max(memory, peak_bytes(process.pid))
        now = count(done) if not first or kill_at else 0
        if not first and now > before:
            first = time.monotonic() - started
        if kill_at and now >= kill_at:
            process.send_signal(signal.SIGKILL)
    seconds = time.monotonic() - started
    if kill_at is None and process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    return Start(name, first or seconds, seconds, count(done) - before, memory)


def count(folder: Path) -> int:
    return sum(1 for _ in os.scandir(folder)) if folder.is_dir() else 0


def peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def main() -> None:
    units, folder = int(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True)
    write_input(folder / "in.jsonl", units)
    starts = [
        run("first start, killed at half", folder, units // 2),
        run("resumed", folder, None),
        run("nothing to do", folder, None),
    ]
    manifest = json.loads((folder / "out/manifest.json").read_text())
    assert manifest["complete"] and manifest["counts"]["committed"] == units
    print("\n".join(map(str, starts)))


if __name__ == "__main__":
    main()
