"""How fast an input is planned: made-up samples through the job's own readers and plan, without an engine."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

import ray

from hs_ray.bench import corpus
from hs_ray.config import BenchJob
from hs_ray.inputs import content_digests, list_sources, split_sources
from hs_ray.pipeline.cluster import PRIVATE, set_environment
from hs_ray.pipeline.planning import read_tables
from hs_ray.plan import ResolvedJob, build_plan, resolve
from hs_ray.storage import LocalStorage

TOKENS = 1000  # of a pre-tokenized sample
CPUS = (1, 2)  # readers; the driver comes on top
SAMPLE_EVERY_S = 2.0


@dataclass(frozen=True)
class Planned:
    """One planning of one input. Ray's start is not counted, the start of its workers is."""

    what: str
    cpus: int
    samples: int
    tokens: int
    seconds: float  # digest of the input, reading, tokenizing, writing the plan
    driver_s: float  # CPU seconds of the driver: what does not become faster with more workers
    workers_s: float  # CPU seconds of all that the driver started: what does, and what a busy machine does not change
    driver_bytes: int  # peak of resident memory
    all_bytes: int  # peak over the driver, Ray's own processes and the workers; shared pages counted once


def bench_plan(job: BenchJob) -> str:
    """Plan `bench.plan_samples` samples of 1,000 tokens, and `bench.plan_chats` chats, with one and two CPUs.

    The inputs (8 bytes a token) and the plans are written to `bench.path` or the temporary folder, and removed.
    """
    rows: list[Planned] = []
    with tempfile.TemporaryDirectory(prefix="hs_ray-bench-", dir=job.bench.path) as name:
        folder = Path(name)
        vocab = _resolved(job).model.vocab_size
        lengths = [TOKENS] * job.bench.plan_samples
        inputs: list[tuple[str, int, Callable[[Path], None]]] = [
            ("pre-tokenized", job.bench.plan_samples, lambda path: corpus.write_tokens(path, lengths, vocab)),
            ("chats", job.bench.plan_chats, lambda path: corpus.write_chats(path, job.bench.plan_chats)),
        ]
        for what, count, write in inputs:
            if not count:
                continue
            path = folder / "input.jsonl"
            write(path)
            resolved = _resolved(job, path)
            rows += [_measure(what, resolved, folder / f"{what}-{cpus}", cpus) for cpus in CPUS]
            path.unlink()
    return format_rows(rows)


def _resolved(job: BenchJob, path: Path | None = None) -> ResolvedJob:
    """The job with that input, in no need of an output or of weights."""
    return resolve(replace(job, dry_run=True, input=replace(job.input, path=None if path is None else str(path))))


def _measure(what: str, resolved: ResolvedJob, output: Path, cpus: int) -> Planned:
    set_environment()
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level="warning", resources={PRIVATE: 1})
    try:
        with _Watch() as watch:
            started, busy, others = time.monotonic(), time.process_time(), watch.others_s
            sources = list_sources(resolved.job.input)
            content_digests(sources)
            tables = read_tables(split_sources(sources), resolved.tokenize_settings, cpus)
            summary = build_plan(LocalStorage(str(output)), tables, resolved)
            seconds, driver_s = time.monotonic() - started, time.process_time() - busy - watch.own_s
            workers_s = watch.others_s - others
    finally:
        ray.shutdown()
    peaks = (watch.driver_bytes, watch.all_bytes)
    return Planned(what, cpus, summary.samples, summary.tokens, seconds, driver_s, workers_s, *peaks)


class _Watch:
    """Memory of this process and of all it started, and CPU time of the latter, looked at now and then. Linux.

    Readers end with the reading: what they took since the last look is not seen.
    """

    def __init__(self) -> None:
        self.driver_bytes = self.all_bytes = 0  # peaks
        self.own_s = 0.0  # CPU time of the looking: walking the pages of every process is not cheap
        self._ticks: dict[str, int] = {}  # CPU time by pid, also of those that have ended
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)

    @property
    def others_s(self) -> float:
        """CPU seconds so far of the processes that this one started."""
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "_Watch":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._look()
            self.own_s = time.thread_time()

    def _look(self) -> None:
        self.driver_bytes = max(self.driver_bytes, _kilobytes("self", "status", "VmRSS:") * 1024)
        family = list(_family("self"))
        self.all_bytes = max(self.all_bytes, 1024 * sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in family))
        for pid in family[1:]:
            if fields := _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split():
                self._ticks[pid] = sum(map(int, fields[11:13]))  # utime, stime: fields 14 and 15 of proc(5)


def _family(pid: str) -> Iterator[str]:
    """A process and all that descend from it."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(path).split():
            yield from _family(child)


def _kilobytes(pid: str, file: str, key: str) -> int:
    line = next((line for line in _read(Path(f"/proc/{pid}/{file}")).splitlines() if line.startswith(key)), "0 0")
    return int(line.split()[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended since
        return ""


def format_rows(rows: list[Planned]) -> str:
    head = f"{'input':<14} {'CPUs':>4} {'samples':>10} {'tokens':>14} {'seconds':>8} {'samples/s':>10} {'tokens/s':>11}"
    lines = [f"{head} {'driver CPU s':>13} {'workers CPU s':>14} {'driver MB':>10} {'all MB':>7}"]
    for row in rows:
        lines.append(
            f"{row.what:<14} {row.cpus:>4} {row.samples:>10,} {row.tokens:>14,} {row.seconds:>8.1f} "
            f"{row.samples / row.seconds:>10,.0f} {row.tokens / row.seconds:>11,.0f} {row.driver_s:>13.1f} "
            f"{row.workers_s:>14.1f} {row.driver_bytes / 1e6:>10,.0f} {row.all_bytes / 1e6:>7,.0f}"
        )
    return "\n".join(lines)
