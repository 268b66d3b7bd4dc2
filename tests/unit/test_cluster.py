"""What fits a cluster: engines live in one node."""

import signal
from typing import Any

import pytest

from hs_ray.config import ExtractJob, load
from hs_ray.errors import ConfigError
from hs_ray.pipeline import cluster
from hs_ray.pipeline.cluster import Cluster
from hs_ray.pipeline.resources import replicas_of


def job(*overrides: str) -> ExtractJob:
    return load(ExtractJob, "extract", overrides)


def test_engines_fit_nodes_not_the_sum_of_their_gpus() -> None:
    found = Cluster((8, 8, 4, 0), cpus=64, local=False)
    assert [found.engines(size) for size in (1, 2, 4, 8)] == [20, 10, 5, 2]
    assert replicas_of(job("engine.tp_size=8"), found, "cuda") == 2
    assert replicas_of(job("engine.tp_size=8"), found, "cpu") == 1
    with pytest.raises(ConfigError, match="20 GPUs, room for 2 engines of that size"):
        replicas_of(job("engine.tp_size=8", "engine.replicas=3"), found, "cuda")


def test_an_engine_larger_than_a_node_is_refused_with_what_is_possible() -> None:
    with pytest.raises(ConfigError, match="no node of the cluster has more than 8 GPUs; use engine.tp_size=8"):
        replicas_of(job("engine.tp_size=16"), Cluster((8, 8), cpus=64, local=False), "cuda")


def test_a_submitted_job_may_not_write_into_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cluster.is_temporary("outputs/demo")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert [cluster.is_temporary(path) for path in ("outputs/demo", "/nvme/hs", "s3://b/hs")] == [True, False, False]


def test_ray_does_not_keep_our_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.init puts one in place that leaves with code 15 and says nothing."""
    ours = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: signal.signal(signal.SIGTERM, _leave))
    cluster._start("local")
    assert signal.getsignal(signal.SIGTERM) is ours


def _leave(*_: Any) -> None:
    raise SystemExit(15)
