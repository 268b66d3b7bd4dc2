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
from chain import RUN_S, Chain, kill_often, scripted_chain
from commit import FINGERPRINT, attempt

from hs_ray.errors import ConfigError, OutputError
from hs_ray.export import export
from hs_ray.manifest import clean_leftovers, drop_untrusted, read_markers
from hs_ray.reader import HiddenStatesDataset
from hs_ray.reader.run import find_shards, load_run
from hs_ray.storage import PerNodeStorage, open_storage
from hs_ray.verify import verify_integrity
from hs_ray.writer import shard_is_whole

pytestmark = pytest.mark.integration


def test_shards_stay_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node, killed now and then; read there, from elsewhere, and once the shards are copied into one place."""
    monkeypatch.setenv("SCRATCH", str(tmp_path / "nvme"))
    out = tmp_path / "out"
    chain = scripted_chain(tmp_path, str(out), seed=0, count=160)
    chain.words.append("output.node_path=$SCRATCH/hs")
    kill_often(chain, random.Random(5), 2, ["driver", "actor"], 2.0)
    chain.finish()  # which verifies and reads through the node's disk
    (disk,) = (tmp_path / "nvme/hs").iterdir()
    shards = sorted(path.name for path in (disk / "shards").iterdir())
    manifest = json.loads((out / "manifest.json").read_text())
    assert [Path(entry["path"]).name for entry in manifest["shards"]] == shards
    name = (disk / "_run/node").read_text()
    assert {entry["node"] for entry in manifest["shards"]} == {name} == set(manifest["nodes"])
    assert not (out / "shards").exists()
    assert not list((disk / "_run/tmp").iterdir())

    chain.words.remove("output.node_path=$SCRATCH/hs")  # forgotten at a resume: nothing is done again, nothing lost
    refuses(chain, "this run left its shards in $SCRATCH/hs; use output.node_path=$SCRATCH/hs")
    chain.words.append("output.node_path=$SCRATCH/hs")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "other"))  # the disk is not mounted, the node is not there yet
    refuses(
        chain, f"committed shards are on disks that are not there: {name} ({len(shards)} shards); start their nodes"
    )

    report = verify_integrity(open_storage(str(out)))  # from another node
    (problem,) = report.problems
    assert f"{len(shards)} shards of other nodes are not here, and none is seen from here: verify there" in str(problem)
    assert report.counts[f"shards on node {name}"] == len(shards)
    with pytest.raises(OutputError, match=f"its shards are on the nodes {name}, none on this one"):
        HiddenStatesDataset(str(out))
    seen_here = find_shards(open_storage(str(out)), load_run(open_storage(str(out))))
    assert len(read_markers(seen_here, manifest["fingerprint"])) == manifest["counts"]["units"]

    shutil.copytree(disk / "shards", out / "shards")
    (out / "shards" / shards[0]).unlink()  # copied in part
    report = verify_integrity(open_storage(str(out)))
    assert "though those of some nodes were copied here" in str(report.problems[0])
    with pytest.raises(OutputError, match=f"were copied into shards/, those of {name} were not"):
        HiddenStatesDataset(str(out))
    shutil.copy(disk / "shards" / shards[0], out / "shards")
    shutil.rmtree(disk)
    monkeypatch.delenv("SCRATCH")
    report = verify_integrity(open_storage(str(out)))
    assert report.ok
    assert report.counts["shards"] == len(shards)
    assert chain.read(incomplete=False) == set(chain.samples)
    monkeypatch.setenv("SCRATCH", str(tmp_path / "other"))
    chain.finish()
    assert "nothing to do: every unit is committed" in chain.tail()


def refuses(chain: Chain, reason: str) -> None:
    chain.log.write_text("")
    victim = chain.start()
    assert (victim.wait(), victim.leftovers()) == (2, [])
    assert reason in chain.tail()
    assert "Traceback" not in chain.tail()


def test_two_outputs_with_one_node_path_leave_each_other_alone(tmp_path: Path) -> None:
    disk = str(tmp_path / "nvme")
    first, second = (PerNodeStorage(open_storage(str(tmp_path / name / "hs")), disk) for name in "ab")
    attempt(first, 0, "0001-aa")
    assert len(first.list("shards")) == 1
    clean_leftovers(second, 1, {})
    assert (len(first.list("shards")), len(second.list("shards"))) == (1, 0)
    assert set(read_markers(first, FINGERPRINT)) == {0}


def test_a_copy_that_was_cut_off_does_not_count_against_the_shard(tmp_path: Path) -> None:
    storage = PerNodeStorage(open_storage(str(tmp_path / "hs")), str(tmp_path / "nvme"))
    marker = attempt(storage, 0, "0001-aa")
    copy = tmp_path / "hs" / str(marker.shard)
    copy.parent.mkdir()
    copy.write_bytes(b"PAR1 and no more")
    assert storage.size(str(marker.shard)) == marker.bytes
    assert set(drop_untrusted(storage, 1, FINGERPRINT)) == {0}
    clean_leftovers(storage, 1, read_markers(storage, FINGERPRINT))
    assert storage.size(str(marker.shard)) == marker.bytes


def test_one_output_has_one_folder_however_it_is_spelled(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "hs")
    roots = (tmp_path / "hs", tmp_path / "link", tmp_path / "x/../hs")
    (tmp_path / "x").mkdir()
    folders = {PerNodeStorage(open_storage(str(root)), str(tmp_path / "nvme")).folder for root in roots}
    assert len(folders) == 1


def test_a_disk_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its node is called: a pod has a new name at each start, two containers may have one."""
    storage = PerNodeStorage(open_storage(str(tmp_path / "hs")), "$SCRATCH")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "one"))
    assert storage.disk_name() is None
    marker = attempt(storage, 0, "0001-aa")
    assert marker.node == storage.disk_name()
    assert storage.holds(marker.node)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert storage.node == marker.node
    assert shard_is_whole(storage, marker)
    monkeypatch.setenv("SCRATCH", str(tmp_path / "two"))
    assert storage.node != marker.node
    assert not storage.holds(marker.node)
    assert shard_is_whole(storage, marker)  # not seen from here, and so believed
    again = attempt(storage, 0, "0001-bb")
    assert again.attempt == "0001-aa"  # the first one stands
    assert len(list((tmp_path / "one").rglob("*.parquet"))) == 1
    assert not list((tmp_path / "two").rglob("*.parquet"))


def test_a_node_path_that_cannot_be(tmp_path: Path) -> None:
    """Found before an engine is started, with the node."""
    chain = scripted_chain(tmp_path, str(tmp_path / "out"), seed=0, count=20)
    chain.words.append("output.node_path=/proc/hs")
    refuses(chain, "output.node_path = /proc/hs: node ")
    assert "cannot write there" in chain.tail()


def test_a_variable_that_a_node_does_not_have(tmp_path: Path) -> None:
    storage = PerNodeStorage(open_storage(str(tmp_path)), "$NOT_SET_ANYWHERE/hs")
    with pytest.raises(OutputError, match="NOT_SET_ANYWHERE.*an absolute path, whose variables are set on every node"):
        storage.scratch("unit-000000-0001-aa.parquet")
    assert storage.list("shards") == []  # looking is no error: a head or a trainer may have no such disk


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    """Three nodes on this machine that differ in name and disk."""
    from ray.cluster_utils import Cluster

    def settings(name: str) -> dict[str, Any]:
        return {"num_cpus": 2, "env_vars": {"SCRATCH": str(tmp_path / name)}}

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
    busy: list[str] = []
    while not busy and time.monotonic() < deadline:
        assert victim.process.poll() is None, chain.tail()
        busy = [name for name in ("a", "b") if len(list((tmp_path / name).rglob("shards/*"))) >= 3]
        time.sleep(0.1)  # files of another process are waited for
    (name_file,) = (tmp_path / busy[0]).rglob("_run/node")
    gone = name_file.read_text()
    nodes.remove_node(nodes.named[busy[0]], allow_graceful=False)
    nodes.add_node(num_cpus=2, env_vars={"SCRATCH": str(tmp_path / "c")})
    assert (victim.wait(), victim.leftovers()) == (2, []), chain.tail()  # all else is done; what is gone may come back
    assert f"committed shards are on disks that are not there: {gone} (" in chain.tail()
    committed = chain.committed()
    refuses(chain, f"committed shards are on disks that are not there: {gone} (")
    assert chain.committed() == committed
    chain.words.append("output.redo_lost=true")
    chain.log.write_text("")
    victim = chain.start()
    assert (victim.wait(), victim.leftovers()) == (0, []), chain.tail()
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["complete"]
    assert gone not in manifest["nodes"]
    seen: set[str] = set()
    for name in ("head", "a", "b", "c"):
        if name == busy[0] or not list((tmp_path / name).rglob("shards/*")):
            continue
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

    made = _half_elsewhere(tmp_path)
    assert len(HiddenStatesDataset(made)) > 0
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for ranks in ({}, {"rank": 1, "world_size": 4}):
        with pytest.raises(ConfigError, match="LOCAL_RANK"):
            HiddenStatesDataset(made, **ranks)
    with pytest.raises(ConfigError, match="even = True"):
        HiddenStatesDataset(made, rank=1, world_size=2, even=True)
    with pytest.raises(OutputError, match="are on other nodes' own disks .there.; copy all shards into"):
        export(made, "speculators", str(tmp_path / "export"))
    both = [len(HiddenStatesDataset(made, rank=rank, world_size=2)) for rank in range(2)]
    assert sum(both) == outputs.open_output(open_storage(made)).samples


def _half_elsewhere(folder: Path) -> str:
    """A complete output whose first shard is on this node's disk, and the others on another's."""
    from make_output import make_output

    made = make_output(folder / "out")
    root, disk = Path(made.path), folder / "disk"
    run = json.loads((root / "_run/run.json").read_text())
    run["config"]["output"]["node_path"] = str(disk)
    (root / "_run/run.json").write_text(json.dumps(run))
    manifest = json.loads((root / "manifest.json").read_text())
    storage = PerNodeStorage(open_storage(str(root)), str(disk))
    for number, entry in enumerate(manifest["shards"]):
        entry["node"] = "there" if number else storage.node
    (root / "manifest.json").write_text(json.dumps(manifest))
    shutil.move(root / "shards", Path(storage.disk.root) / "shards")
    for entry in manifest["shards"][1:]:
        storage.disk.remove(entry["path"])
    return os.fspath(root)
