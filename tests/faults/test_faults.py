"""A hundred kills and more: actors, scheduler processes, writers, nodes and drivers, local and S3, disks that fill up.

`make test-faults` runs every chain, prints the counts, and goes on where it was stopped: a chain that held is noted in
outputs/faults, and not run again on the same code. `make test` runs the first, short one.
"""

import hashlib
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import chain as chains
import numpy as np
import pytest
from chain import REAL, Chain, kill_often, scripted_chain, write_samples
from s3 import Bucket
from scripted import START_DIES

from hs_ray.reader import HiddenStatesDataset
from hs_ray.schema import ATTEMPTS, DONE

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
PARTS = [("hs_ray", "*.py"), ("jobs", "*.py"), ("tests/faults", "*.py"), ("patches", "*.patch")]
CODE = [path for part, files in PARTS for path in sorted((ROOT / part).rglob(files))]
NOTES = ROOT / "outputs/faults" / hashlib.sha256(b"".join(path.read_bytes() for path in CODE)).hexdigest()[:16]
MakeChain = Callable[[Path, int], Chain]  # from a folder of its own and a seed
KILLS = ("driver", "actor", "scheduler", "writer", "node")
LOCAL = [f"local-{seed}" for seed in range(4)]
S3 = [f"s3-{seed}" for seed in range(2)]
NODES = [f"nodes-{seed}" for seed in range(2)]
REAL_ENGINE = [f"real-{seed}" for seed in range(2)]
CHAINS = [*LOCAL, *S3, *NODES, "disk", *REAL_ENGINE]
MOST_FAULTS = 3  # that wait for their request
UNITS = 60  # of 200 samples, about
LOCAL_KILLS, S3_KILLS, REAL_KILLS, NODE_KILLS = 17, 8, 11, 3


def note(name: str, counts: Counter[str]) -> None:
    NOTES.mkdir(parents=True, exist_ok=True)
    (NOTES / f"{name}.json").write_text(json.dumps(counts))
    print(f"{name}: {dict(counts)}")


def unless_noted(name: str) -> None:
    if (NOTES / f"{name}.json").exists():
        pytest.skip(f"{name} held before: {(NOTES / f'{name}.json').read_text()}")


def until_killed(
    name: str, kills: int, kinds: list[str], longest_s: float, within: Path, make: MakeChain
) -> Counter[str]:
    """Chains one after the other, each to its end, until there were so many kills."""
    rng, counts = random.Random(name), Counter[str]()
    while (left := kills - sum(counts[kind] for kind in KILLS)) > 0:
        folder = Path(tempfile.mkdtemp(dir=within))
        chain = make(folder, rng.randrange(1000))
        kill_often(chain, rng, left, kinds, longest_s)
        chain.finish()
        counts += chain.counts
    return counts


def test_a_few_kills(tmp_path: Path) -> None:
    """The short one, of every `make test`."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=160)
    kill_often(chain, random.Random(3), 3, ["driver", "actor", "writer"], 2.0)
    chain.finish()
    assert sum(chain.counts[kind] for kind in KILLS) >= 1


def test_sigterm_finishes_what_is_in_hand(tmp_path: Path) -> None:
    """cluster.grace_seconds: exit code 1, the way to resume is said, and no unit that was begun is lost."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=200)
    chain.words.append("cluster.grace_seconds=60")
    victim = chain.start()
    wait_until(chain, victim, lambda: chain.committed() >= 2)
    begun = {info.path.split("/")[-1][:11] for info in chain.storage.list(ATTEMPTS)}
    victim.process.terminate()
    assert victim.wait() == 1, chain.tail()
    assert "finishing the units in hand, 60 s at most" in chain.tail()
    assert "stopped by SIGTERM: what is committed stays; run the same command again to resume" in chain.tail()
    assert "Traceback" not in chain.tail()
    assert begun and begun <= {Path(info.path).stem for info in chain.storage.list(DONE)}
    assert chain.storage.list(ATTEMPTS) == []
    assert chain.committed() < UNITS
    chain.judge(victim, finished=False)


def test_what_fails_in_an_actor_is_one_message(tmp_path: Path) -> None:
    """A disk's error ends the run with 1, one that the user can mend with 2; neither as Ray's trace."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=40)
    victim = chain.start(**{chains.WRITER_FAILS_AT: "5-"})
    assert victim.wait() == 1 and victim.leftovers() == []
    said = "the run failed: OSError: [Errno 5] Input/output error (injected); run the same command again to resume"
    assert said in chain.tail().splitlines()
    for path in (tmp_path / "out/_run/samples").iterdir():
        path.write_bytes(b"PAR1 not any more")
    victim = chain.start()
    assert victim.wait() == 2 and victim.leftovers() == []
    assert ", cannot be read (" in chain.tail() and "restore the file, or start a run in another folder" in chain.tail()
    assert "Traceback" not in chain.tail() and "ray.data" not in chain.tail() and "UDF" not in chain.tail()


def test_an_error_that_passes_is_tried_again(tmp_path: Path) -> None:
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=40)
    victim = chain.start(**{chains.WRITER_FAILS_AT: "5"})
    assert victim.wait() == 0, chain.tail()
    chain.judge(victim, finished=True)


def test_an_engine_that_is_killed_whenever_it_starts_ends_the_run(tmp_path: Path) -> None:
    """Ray itself would start it again and again."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=40)
    victim = chain.start(**{START_DIES: "all"})
    assert victim.wait() == 1 and victim.leftovers() == []
    assert "died 3 times in a row while it started" in chain.tail()
    assert "Traceback" not in chain.tail()


def test_one_engine_that_cannot_start_is_left_out(tmp_path: Path) -> None:
    """As on a node with a broken GPU: the others do its work."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=500)
    chain.words.append("engine.replicas=2")
    victim = chain.start(**{START_DIES: str(tmp_path / "chosen")})
    assert victim.wait() == 0, chain.tail()
    assert "died 3 times while it started, and is left out" in chain.log.read_text()
    chain.judge(victim, finished=True)


def test_no_run_depends_on_the_board(tmp_path: Path) -> None:
    """It is killed as often as it comes back, and an engine starts again meanwhile."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=160)
    victim = chain.start()
    wait_until(chain, victim, lambda: chain.committed() >= 2)
    rng, stop = random.Random(1), threading.Event()
    killer = threading.Thread(target=lambda: kill_until(stop, victim, chains.BOARD, rng))
    killer.start()
    try:
        time.sleep(1)  # a board or two die before the actor does
        assert victim.kill_one(chains.ACTOR, rng, 5)
        assert victim.wait() == 0, chain.tail()
    finally:
        stop.set()
        killer.join()
    chain.judge(victim, finished=True)


def kill_until(stop: threading.Event, victim: chains.Victim, name: str, rng: random.Random) -> None:
    while not stop.wait(0.3):
        victim.kill_one(name, rng, 0.1)


@pytest.mark.faults
@pytest.mark.parametrize("name", LOCAL)
def test_local(name: str, tmp_path: Path) -> None:
    unless_noted(name)
    kinds = ["driver", "driver", "actor", "writer"]

    def make(folder: Path, seed: int) -> Chain:
        return scripted_chain(folder, str(folder / "out"), seed)

    note(name, until_killed(name, LOCAL_KILLS, kinds, 4.0, tmp_path, make))


@pytest.mark.faults
@pytest.mark.parametrize("name", S3)
def test_s3_that_fails_now_and_then(name: str, s3: Bucket, tmp_path: Path) -> None:
    """Dropped connections, lost answers, 500, 503 and slowness, while drivers and actors are killed."""
    unless_noted(name)

    def make(folder: Path, seed: int) -> Chain:
        chain = scripted_chain(folder, f"{s3.url}/{folder.name}", seed, count=200)
        chain.options = s3.options
        return chain

    stop = threading.Event()
    trouble = threading.Thread(target=make_trouble, args=(s3, random.Random(name), stop))
    trouble.start()
    try:
        counts = until_killed(name, S3_KILLS, ["driver", "driver", "actor"], 4.0, tmp_path, make)
    finally:
        stop.set()
        trouble.join()
    assert s3.uploads() == 0
    note(name, counts)


def make_trouble(bucket: Bucket, rng: random.Random, stop: threading.Event) -> None:
    while not stop.wait(rng.uniform(0.2, 1.5)):
        if sum(fault.times for fault in bucket.faults) >= MOST_FAULTS:
            continue  # those that wait for a rare request would all hit it, one try after the other
        action = rng.choice(["before", "during", "after", "cut", "hang", "status"])
        status, code = rng.choice([(500, "InternalError"), (503, "SlowDown")])
        bucket.fault(rng.choice(["PUT", "GET", "POST"]), action, status=status, code=code, seconds=1.0)


@pytest.fixture
def three_nodes() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


@pytest.mark.faults
@pytest.mark.parametrize("name", NODES)
def test_nodes_die(name: str, three_nodes: object, tmp_path: Path) -> None:
    """Two engines on three nodes; nodes are taken away in the middle, and others come: one run, through at the end."""
    unless_noted(name)
    rng, cluster = random.Random(name), three_nodes
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), rng.randrange(1000), count=2500)
    chain.words = [word for word in chain.words if not word.startswith("cluster.address")]
    chain.words += [f"cluster.address={cluster.address}", "engine.replicas=2"]  # type: ignore[attr-defined]
    victim = chain.start()
    deadline = time.monotonic() + chains.RUN_S
    while chain.committed() < 3 and time.monotonic() < deadline:
        assert victim.process.poll() is None, chain.tail()
        time.sleep(0.1)
    for _ in range(NODE_KILLS):
        time.sleep(rng.uniform(1, 6))
        node = rng.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id))  # type: ignore[attr-defined]
        cluster.remove_node(node, allow_graceful=False)  # type: ignore[attr-defined]
        cluster.add_node(num_cpus=2)  # type: ignore[attr-defined]
        chain.counts["node"] += victim.process.poll() is None
    assert victim.wait() == 0, chain.tail()
    chain.judge(victim, finished=True)
    assert chain.counts["node"] >= 1
    note(name, chain.counts)


@pytest.mark.faults
def test_a_folder_that_one_node_sees_is_refused(three_nodes: object, tmp_path: Path) -> None:
    """Such a folder, on one machine: /proc/self/cwd is another one for the driver than for the nodes."""
    chain = scripted_chain(tmp_path, "/proc/self/cwd/out", seed=0, count=20)
    chain.words = [word for word in chain.words if not word.startswith("cluster.address")]
    chain.words += [f"cluster.address={three_nodes.address}"]  # type: ignore[attr-defined]
    chain.folder = tmp_path
    victim = chain.start()
    assert victim.wait() == 2 and victim.leftovers() == []
    assert "3 of 3 nodes of the Ray cluster do not see what this one writes there" in chain.tail()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.faults
def test_a_disk_fills_up(small_disk: Path, tmp_path: Path) -> None:
    """The run waits and says so; killed while it waits it is refused until there is room; then it goes on."""
    unless_noted("disk")
    rng = random.Random("disk")
    chain = scripted_chain(tmp_path, str(small_disk / "out"), seed=1, count=250)  # 26 MB
    filler = small_disk / "filler"
    for kind in ("driver", "actor"):
        victim = chain.start()
        wait_until(chain, victim, lambda: chain.committed() > chain.counts["judged"] * 5 + 2)
        fill(filler)
        wait_until(chain, victim, lambda: waits(chain))
        time.sleep(rng.uniform(0, 2))
        if kind == "actor":
            assert victim.kill_one(chains.ACTOR, rng, 5)
            chain.counts["actor"] += 1
            time.sleep(3)
        chain.counts["driver"] += victim.kill()
        chain.judge(victim, finished=False)
        refused = chain.start()
        assert refused.wait() == 2, chain.tail()
        chain.judge(refused, finished=False)
        filler.unlink()
        chain.log.write_text("")
    victim = chain.start()
    wait_until(chain, victim, lambda: chain.committed() > 20)
    fill(filler)
    wait_until(chain, victim, lambda: waits(chain))
    filler.unlink()
    assert victim.wait() == 0, chain.tail()
    chain.judge(victim, finished=True)
    note("disk", chain.counts)


def waits(chain: Chain) -> bool:
    """Whether a progress line names an engine that waits for room."""
    return " waits: " in chain.log.read_text(errors="replace")


def fill(path: Path) -> None:
    with path.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), bytes(64 * 1024))
        except OSError:
            pass


def wait_until(chain: Chain, victim: chains.Victim, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert victim.process.poll() is None and time.monotonic() < deadline, chain.tail()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The real engine's output of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    chain = real_chain(folder)
    chain.finish()
    return chain


def real_chain(folder: Path) -> Chain:
    samples = write_samples(folder / "in.jsonl", 7, 300, longest=400)
    words = [
        "cluster.address=local",
        "model=tiny_random",
        f"input.path={folder}/in.jsonl",
        "output.shard_bytes=300KB",
        "capture.canary=false",
        "engine.device=cpu",
        "engine.chunked_prefill_size=128",
        "cluster.lease_seconds=4",
        "cluster.max_retries=20",
    ]
    return Chain(REAL, str(folder / "out"), words, samples, folder / "log")


@pytest.mark.faults
@pytest.mark.parametrize("name", REAL_ENGINE)
def test_the_real_engine(name: str, undisturbed: Chain, tmp_path: Path) -> None:
    unless_noted(name)
    made: list[Chain] = []

    def make(folder: Path, seed: int) -> Chain:
        made.append(real_chain(folder))
        return made[-1]

    counts = until_killed(name, REAL_KILLS, ["driver", "actor", "scheduler"], 5.0, tmp_path, make)
    for chain in made:
        assert worst_difference(chain.output, undisturbed.output) <= 0.02
    note(name, counts)


def worst_difference(one: str, other: str) -> float:
    """Largest relative error of a sample's state against the other output's: bf16 noise of other batches."""
    first, second = HiddenStatesDataset(one), HiddenStatesDataset(other)
    place = {second[index]["sample_id"]: index for index in range(len(second))}
    worst = 0.0
    for index in range(len(first)):
        ours = first[index]
        theirs = second[place[ours["sample_id"]]]
        for column in first.columns:
            a, b = (sample[column].float().numpy() for sample in (ours, theirs))
            worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return worst


@pytest.mark.faults
def test_the_counts() -> None:
    """All chains together: at least 100 kills, 20 of them with the real engine."""
    missing = [name for name in CHAINS if not (NOTES / f"{name}.json").exists()]
    assert not missing, f"not yet held: {missing}"
    counts = {name: Counter(json.loads((NOTES / f"{name}.json").read_text())) for name in CHAINS}
    total = sum(counts.values(), Counter[str]())
    real = sum((counts[name] for name in REAL_ENGINE), Counter[str]())
    print(f"all chains: {dict(total)}; with the real engine: {dict(real)}")
    assert sum(total[kind] for kind in KILLS) >= 100
    assert sum(real[kind] for kind in KILLS) >= 20
