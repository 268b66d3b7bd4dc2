"""What fits a cluster: engines live in one node."""

import signal
from typing import Any

import pytest

from hs_ray.config import ExtractJob, load
from hs_ray.errors import ConfigError
from hs_ray.pipeline import cluster
from hs_ray.pipeline.cluster import Cluster
from hs_ray.pipeline.resources import replicas_of, units_at_once


def job(*overrides: str) -> ExtractJob:
    return load(ExtractJob, "extract", overrides)


def test_engines_fit_nodes_not_the_sum_of_their_gpus() -> None:
    found = Cluster((8, 8, 4, 0), cpus=64)
    assert [found.engines(size) for size in (1, 2, 4, 8)] == [20, 10, 5, 2]
    assert replicas_of(job("engine.tp_size=8"), found, "cuda") == 2
    assert replicas_of(job("engine.tp_size=8"), found, "cpu") == 1
    with pytest.raises(ConfigError, match="20 GPUs, room for 2 engines of that size"):
        replicas_of(job("engine.tp_size=8", "engine.replicas=3"), found, "cuda")


def test_an_engine_larger_than_a_node_is_refused_with_what_is_possible() -> None:
    with pytest.raises(ConfigError, match="no node of the cluster has more than 8 GPUs; use engine.tp_size=8"):
        replicas_of(job("engine.tp_size=16"), Cluster((8, 8), cpus=64), "cuda")


def test_compression_takes_more_writers() -> None:
    assert units_at_once(job()) == 4
    assert units_at_once(job("output.compression=split_zstd")) == 8
    assert units_at_once(job("engine.tp_size=8")) == 8
    assert units_at_once(job("output.compression=split_zstd", "cluster.prefetch_units=3")) == 3


def test_a_submitted_job_may_not_write_into_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cluster.is_temporary("outputs/demo")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert [cluster.is_temporary(path) for path in ("outputs/demo", "/nvme/hs", "s3://b/hs")] == [True, False, False]


def test_ray_does_not_keep_our_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.init puts one in place that leaves with code 15 and says nothing."""
    ours = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: signal.signal(signal.SIGTERM, _leave))
    monkeypatch.setattr(cluster.janitor, "start", lambda: 1)
    monkeypatch.setattr(cluster, "_janitors", [])
    cluster._start("local")
    assert signal.getsignal(signal.SIGTERM) is ours


def _leave(*_: Any) -> None:
    raise SystemExit(15)


class FakeRay:
    """A machine on which another job's cluster is found: what it has, and the addresses that were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, float]):
        self.asked: list[str] = []
        self.resources = theirs
        for name, value in {
            "init": self.init,
            "is_initialized": lambda: False,
            "shutdown": lambda: None,
            "cluster_resources": lambda: self.resources,
            "nodes": list,
        }.items():
            monkeypatch.setattr(cluster.ray, name, value)
        monkeypatch.setattr(cluster.janitor, "start", lambda: 1)
        monkeypatch.setattr(cluster, "_janitors", [])
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(self, address: str, **options: Any) -> None:
        self.asked.append(address)
        if address == "local":
            self.resources = {"CPU": options["num_cpus"], **options["resources"]}


def test_a_job_does_not_join_the_cluster_that_ends_with_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch, {"CPU": 2, cluster.PRIVATE: 1})
    assert cluster.connect("auto").cpus >= cluster.MIN_CPUS
    assert fake.asked == ["auto", "local"]


def test_a_job_joins_a_cluster_that_was_started_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch, {"CPU": 2})
    assert cluster.connect("auto").cpus == 2
    assert fake.asked == ["auto"]


def test_two_jobs_do_not_fight_for_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, {"CPU": 2, "GPU": 8, cluster.PRIVATE: 1})
    with pytest.raises(ConfigError, match="another hs_ray job runs on this machine, and this machine's 8 GPUs"):
        cluster.connect("auto")


def test_an_address_where_nothing_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would ask again for minutes, and end the process."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)  # other tests' cluster may be up
    with pytest.raises(ConfigError, match=r"^cluster.address = 127.0.0.1:1: no Ray cluster answers there \(.*refused"):
        cluster.connect("127.0.0.1:1")
