"""Memory over a long run: python tests/soak.py MINUTES FOLDER

Starts jobs/extract.py on CPU with an input long enough, samples the resident memory of the driver, the actor and the
scheduler every few seconds, and writes FOLDER/memory.csv and FOLDER/memory.svg. Ends with 1 if any of them grew by more
than ALLOWED after its warm-up: the last quarter against the second one, medians.
"""

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERY_S = 5.0
ALLOWED = 1.05  # of the second quarter
TOKENS_PER_S = 2000  # more than tiny_random does on two cores, so that the input outlasts the run
ROLES = ("driver", "actor", "scheduler")
COLOURS = {"driver": "#2a6fb5", "actor": "#1a7f45", "scheduler": "#9a5b00"}


def write_input(path: Path, minutes: float) -> None:
    """The demo's samples again and again, under other ids."""
    samples = [json.loads(line) for line in (ROOT / "hs_ray/demo/samples.jsonl").read_text().splitlines()]
    rounds = int(minutes * 60 * TOKENS_PER_S / 20_000) + 1
    with path.open("w") as file:
        for number in range(rounds):
            for sample in samples:
                file.write(json.dumps(sample | {"id": f"{sample['id']}-{number}"}) + "\n")


def rss(pid: int) -> float:
    """MB of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def family(pid: int) -> dict[str, int]:
    """Role -> pid among the processes that descend from the driver."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
    found = {"driver": pid}
    for process, name in names.items():
        ancestor: int | None = process
        while ancestor not in (None, pid):
            ancestor = parents.get(ancestor)
        if ancestor == pid and "HiddenStateExtractor" in name:
            found["actor"] = process
        elif ancestor == pid and name.startswith("sglang::scheduler"):
            found["scheduler"] = process
    return found


def sample_until(process: subprocess.Popen[bytes], minutes: float) -> list[tuple[float, str, float]]:
    rows: list[tuple[float, str, float]] = []
    started: float | None = None  # of all three
    while process.poll() is None:
        roles = family(process.pid)
        if started is None and len(roles) == len(ROLES):
            started = time.monotonic()
        if started is not None:
            now = time.monotonic() - started
            if now > 60 * minutes:
                break
            for role, pid in roles.items():
                try:
                    rows.append((round(now, 1), role, round(rss(pid), 1)))
                except OSError:
                    continue
        time.sleep(EVERY_S)
    return rows


def svg(rows: list[tuple[float, str, float]]) -> str:
    width, height, left, bottom = 900, 320, 60, 30
    last, most = max(t for t, _, _ in rows), max(mb for _, _, mb in rows) * 1.1
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for tick in range(6):
        y = (height - bottom) * (1 - tick / 5) + 5
        parts.append(f'<line x1="{left}" x2="{width}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{most * tick / 5:,.0f} MB</text>')
        parts.append(
            f'<text x="{left + (width - left - 40) * tick / 5:.0f}" y="{height - 8}">{last * tick / 300:.1f} min</text>'
        )
    for number, role in enumerate(ROLES):
        points = " ".join(
            f"{left + (width - left) * t / last:.1f},{(height - bottom) * (1 - mb / most) + 5:.1f}"
            for t, name, mb in rows if name == role
        )  # fmt: skip
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[role]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{left + 12 + 90 * number}" y="20" fill="{COLOURS[role]}">{role}</text>')
    return "".join([*parts, "</svg>"])


def growth(rows: list[tuple[float, str, float]]) -> dict[str, float]:
    """Role -> median of its last quarter over that of its second."""
    last = max(t for t, _, _ in rows)
    result = {}
    for role in ROLES:
        quarter = [
            [mb for t, name, mb in rows if name == role and q * last / 4 <= t <= (q + 1) * last / 4] for q in (1, 3)
        ]
        result[role] = statistics.median(quarter[1]) / statistics.median(quarter[0])
    return result


def main(minutes: float, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    write_input(folder / "in.jsonl", minutes)
    job = ["model=tiny_random", f"input.path={folder}/in.jsonl", f"output.path={folder}/out", "output.shard_bytes=4MB"]
    with (folder / "job.log").open("w") as log:
        command = [sys.executable, str(ROOT / "jobs/extract.py"), *job, "cluster.address=local"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        rows = sample_until(process, minutes)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    with (folder / "memory.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("seconds", "process", "MB"), *rows])
    (folder / "memory.svg").write_text(svg(rows))
    grown = growth(rows)
    print(f"exit code {code} (1: stopped after {minutes} minutes); last quarter / second quarter:")
    print("\n".join(f"  {role:<10} {ratio:.3f}" for role, ratio in grown.items()))
    return int(max(grown.values()) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2])))
