"""output.node_path: shards on each node's own disk. A node that goes takes them along, and its units run again."""

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chain import RUN_S, kill_often, scripted_chain

from hs_ray.errors import ConfigError, OutputError
from hs_ray.manifest import read_markers
from hs_ray.reader import HiddenStatesDataset
from hs_ray.reader.output import find_shards, load_run
from hs_ray.storage import PerNodeStorage, open_storage
from hs_ray.verify import verify_integrity

pytestmark = pytest.mark.integration


def test_shards_stay_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node, killed now and then; read there, from elsewhere, and once the shards are copied into one place."""
    monkeypatch.setenv("HS_RAY_NODE", "node-a")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "nvme"))
    out = tmp_path / "out"
    chain = scripted_chain(tmp_path, str(out), seed=0, count=160)
    chain.words.append("output.node_path=$SCRATCH/hs")
    kill_often(chain, random.Random(5), 2, ["driver", "actor"], 2.0)
    chain.finish()  # which verifies and reads through the node's disk
    shards = sorted(path.name for path in (tmp_path / "nvme/hs/shards").iterdir())
    manifest = json.loads((out / "manifest.json").read_text())
    assert [Path(entry["path"]).name for entry in manifest["shards"]] == shards
    assert {entry["node"] for entry in manifest["shards"]} == {"node-a"} == set(manifest["nodes"])
    assert not (out / "shards").exists()
    assert not list((tmp_path / "nvme/hs/_run/tmp").iterdir())

    chain.words.remove("output.node_path=$SCRATCH/hs")  # forgotten at a resume: nothing is done again, nothing lost
    refused = chain.start()
    assert (refused.wait(), refused.leftovers()) == (2, [])
    assert "this run left its shards in $SCRATCH/hs; use output.node_path=$SCRATCH/hs" in chain.tail()

    monkeypatch.setenv("HS_RAY_NODE", "node-b")
    report = verify_integrity(open_storage(str(out)))
    assert report.ok
    assert report.counts["shards on node node-a"] == len(shards)
    with pytest.raises(OutputError, match="its shards are on the nodes node-a, none on this one .node-b"):
        HiddenStatesDataset(str(out))
    seen_here = find_shards(open_storage(str(out)), load_run(open_storage(str(out))))
    assert len(read_markers(seen_here, manifest["fingerprint"])) == manifest["counts"]["units"]
    shutil.copytree(tmp_path / "nvme/hs/shards", out / "shards")
    report = verify_integrity(open_storage(str(out)))
    assert report.ok
    assert report.counts["shards"] == len(shards)
    assert chain.read(incomplete=False) == set(chain.samples)


def test_a_node_path_that_cannot_be(tmp_path: Path) -> None:
    """Found before an engine is started, with the node."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=20)
    chain.words.append("output.node_path=/proc/hs")
    victim = chain.start()
    assert (victim.wait(), victim.leftovers()) == (2, [])
    assert "output.node_path = /proc/hs, node " in chain.tail()
    assert "cannot write there" in chain.tail()
    assert "Traceback" not in chain.tail()


def test_a_variable_that_a_node_does_not_have(tmp_path: Path) -> None:
    storage = PerNodeStorage(open_storage(str(tmp_path)), "$NOT_SET_ANYWHERE/hs")
    with pytest.raises(OutputError, match="NOT_SET_ANYWHERE.*an absolute path, whose variables are set on every node"):
        storage.size("shards/unit-000000-0001-aa.parquet")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    """Three nodes on this machine that differ in name and disk."""
    from ray.cluster_utils import Cluster

    def settings(name: str) -> dict[str, Any]:
        return {"num_cpus": 2, "env_vars": {"HS_RAY_NODE": name, "SCRATCH": str(tmp_path / name)}}

    cluster = Cluster(initialize_head=True, head_node_args=settings("head"))
    cluster.named = {name: cluster.add_node(**settings(name)) for name in ("a", "b")}
    yield cluster
    cluster.shutdown()


@pytest.mark.faults
def test_a_node_goes_and_takes_its_shards(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=1, count=1500)
    chain.words = [word for word in chain.words if not word.startswith("cluster.address")]
    chain.words += [f"cluster.address={nodes.address}", "engine.replicas=2", "output.node_path=$SCRATCH/hs"]
    victim = chain.start()
    deadline = time.monotonic() + RUN_S
    names = ("head", "a", "b")
    while time.monotonic() < deadline:
        assert victim.process.poll() is None, chain.tail()
        busy = [name for name in names[1:] if len(list((tmp_path / name).glob("hs/shards/*"))) >= 3]
        if busy:
            break
        time.sleep(0.1)
    nodes.remove_node(nodes.named[busy[0]], allow_graceful=False)
    shutil.rmtree(tmp_path / busy[0])
    nodes.add_node(num_cpus=2, env_vars={"HS_RAY_NODE": "c", "SCRATCH": str(tmp_path / "c")})
    assert victim.wait() == 0, chain.tail()
    assert "committed units have lost their shards" in chain.tail()
    assert victim.leftovers() == []
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["complete"]
    assert busy[0] not in manifest["nodes"]
    seen: set[str] = set()
    for name in manifest["nodes"]:
        monkeypatch.setenv("HS_RAY_NODE", name)
        monkeypatch.setenv("SCRATCH", str(tmp_path / name))
        report = verify_integrity(open_storage(chain.output))
        assert report.ok, "\n".join(report.lines())
        part = chain.read(incomplete=False)
        assert part
        assert not part & seen
        seen |= part
    assert seen == set(chain.samples)


def test_ranks_of_all_nodes_cannot_share_one_nodes_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A trainer on several nodes: each node's processes split what is on that node."""
    import torch

    from hs_ray.reader import output as outputs

    made = _half_elsewhere(tmp_path, monkeypatch)
    assert len(HiddenStatesDataset(made)) > 0
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        HiddenStatesDataset(made)
    both = [len(HiddenStatesDataset(made, rank=rank, world_size=2)) for rank in range(2)]
    assert sum(both) == outputs.open_output(open_storage(made)).samples


def _half_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A complete output whose first shard is on this node's disk, and the others on another's."""
    from make_output import make_output

    made = make_output(folder / "out")
    monkeypatch.setenv("HS_RAY_NODE", "here")
    root, disk = Path(made.path), folder / "disk"
    run = json.loads((root / "_run/run.json").read_text())
    run["config"]["output"]["node_path"] = str(disk)
    (root / "_run/run.json").write_text(json.dumps(run))
    manifest = json.loads((root / "manifest.json").read_text())
    for number, entry in enumerate(manifest["shards"]):
        entry["node"] = "there" if number else "here"
    (root / "manifest.json").write_text(json.dumps(manifest))
    shutil.move(root / "shards", disk / "shards")
    for entry in manifest["shards"][1:]:
        (disk / entry["path"]).unlink()
    return os.fspath(root)
