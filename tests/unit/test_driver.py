"""The driver's own order: what refuses comes before run.json, and whatever happens nothing is left running. No Ray."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hub import Hub
from safetensors.torch import save

from hs_ray.config import Compression, ExtractJob, Final, OnExisting
from hs_ray.errors import LostLeaseError, OutputError, RunError, UnsupportedError
from hs_ray.inputs import iter_chunk
from hs_ray.model import resolve_model
from hs_ray.pipeline import driver, remaining
from hs_ray.pipeline.actor import ActorJob
from hs_ray.pipeline.cluster import Cluster
from hs_ray.reader import load_final_norm
from hs_ray.schema import FINAL_NORM, MANIFEST, RUN_JSON, SHARDS, Marker, marker_path
from hs_ray.storage import LocalStorage, open_storage
from hs_ray.weights import norm_digest

COUNTED: list[tuple[str, int]] = []  # (engine, lines) that went into hs_rejected_total


class FakeMetrics:
    def __init__(self, engine: str, node: str):
        self.engine = engine

    def rejected(self, lines: int) -> None:
        COUNTED.append((self.engine, lines))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four CPUs, read in this process; an engine that does not come up."""

    def read(chunks: Sequence[Any], settings: Any, cpus: int) -> Iterator[pa.Table]:
        for chunk in chunks:
            yield from iter_chunk(chunk, settings)

    def engine_fails(extraction: Any) -> Iterator[Marker]:
        raise RunError("the engine could not load the model")
        yield

    COUNTED.clear()
    monkeypatch.setattr(driver.cluster, "connect", lambda address: Cluster((), 4))
    monkeypatch.setattr(driver.nodes, "check_shared", lambda storage: None)
    monkeypatch.setattr(driver.planning, "read_tables", read)
    monkeypatch.setattr(remaining, "extract_units", engine_fails)
    monkeypatch.setattr(driver, "Metrics", FakeMetrics)
    monkeypatch.setattr(driver.ray.util, "get_node_ip_address", lambda: "node")


@pytest.fixture
def job(tmp_path: Path, tiny_random: Path) -> ExtractJob:
    """Nine samples and a bad line."""
    lines = [json.dumps({"id": str(i), "input_ids": [1, 2, 3]}) for i in range(9)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "bad"]))
    made = ExtractJob(max_seq_len=64)
    made.model.path, made.input.path, made.output.path = (
        str(tiny_random),
        str(tmp_path / "in.jsonl"),
        str(tmp_path / "o"),
    )
    made.input.max_rejected, made.output.min_free_bytes = 0.5, "0"
    return made


def run_json(job: ExtractJob) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(job.output.path or "") / RUN_JSON).read_bytes())
    return found


def start(job: ExtractJob) -> None:
    with pytest.raises(RunError, match="could not load the model"):
        driver.run(job)


REFUSED: dict[str, tuple[Callable[[ExtractJob], None], str]] = {
    "the disk": (lambda job: setattr(job.output, "min_free_bytes", "900TB"), "or output.compression=split_zstd"),
    "the ring": (lambda job: setattr(job.engine, "max_inflight_tokens", 1), "of them must fit"),
    "the device": (lambda job: setattr(job.engine, "device", "cuda"), "the Ray cluster has no GPU"),
    "the rejects": (lambda job: setattr(job.input, "max_rejected", 0.0), "are unusable"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_start_leaves_no_run(job: ExtractJob, what: str) -> None:
    change, text = REFUSED[what]
    change(job)
    with pytest.raises(Exception, match=text) as caught:
        driver.run(job)
    assert getattr(caught.value, "exit_code", None) == 2
    assert not open_storage(str(job.output.path)).exists(RUN_JSON) and COUNTED == []


def test_the_advice_can_be_followed_in_the_same_output(job: ExtractJob) -> None:
    job.output.min_free_bytes = "900TB"
    with pytest.raises(OutputError, match="output.compression=split_zstd"):
        driver.run(job)
    job.output.min_free_bytes, job.output.compression = "0", Compression.split_zstd
    start(job)
    assert run_json(job)["config"]["output"]["compression"] == "split_zstd"


def test_a_start_that_committed_nothing_is_superseded(job: ExtractJob) -> None:
    start(job)
    first = run_json(job)
    job.layers = [1]
    start(job)
    second = run_json(job)
    assert second["fingerprint"] != first["fingerprint"] and second["spec"]["layers"][0]["id"] == 1


def test_it_is_not_where_something_was_committed_or_may_have_been(job: ExtractJob) -> None:
    start(job)
    before, storage = run_json(job), open_storage(str(job.output.path))
    job.layers = [1]
    for path in (marker_path(0), f"{SHARDS}/unit-000000-0001-aa.parquet", MANIFEST):
        storage.write(path, b"{}")
        with pytest.raises(OutputError, match="made by another configuration"):
            driver.run(job)
        storage.remove(path)
    job.output.on_existing = OnExisting.fail
    with pytest.raises(OutputError, match="made by another configuration"):
        driver.run(job)
    assert run_json(job) == before


def test_a_death_between_two_plans_leaves_neither(job: ExtractJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first configuration's run.json beside the second's samples would give wrong states in silence."""
    start(job)
    first = job.layers

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    job.layers = [1]
    with monkeypatch.context() as patch:
        patch.setattr(driver, "build_plan", dies)
        with pytest.raises(KeyboardInterrupt):
            driver.run(job)
    planned: list[int] = []
    plan = driver.build_plan
    monkeypatch.setattr(driver, "build_plan", lambda *args: planned.append(1) or plan(*args))
    job.layers = first
    start(job)
    assert planned, "the plan on the disk may be anyone's: it has to be made again"


@pytest.mark.parametrize("when", ["reading", "a full disk"])
def test_a_driver_that_was_taken_over_while_it_planned_writes_nothing(
    job: ExtractJob, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Stopped for a while, or waiting for a disk that takes no heartbeat: the newer driver's plan stands."""
    storage = open_storage(str(job.output.path))

    def taken_over() -> None:
        storage.write("_run/leases/000002.json", b"{}")
        storage.write("_run/samples/part-00000.parquet", b"the newer driver's")

    def read(chunks: Sequence[Any], settings: Any, cpus: int) -> Iterator[pa.Table]:
        for chunk in chunks:
            yield from iter_chunk(chunk, settings)
            taken_over()

    def full(storage: Any, tables: Any, resolved: Any, on_wait: Callable[[str, float], None]) -> None:
        taken_over()
        on_wait("0 bytes free", 1.0)

    if when == "reading":
        monkeypatch.setattr(driver.planning, "read_tables", read)
    else:
        monkeypatch.setattr(driver, "build_plan", full)
    with pytest.raises(LostLeaseError, match="taken over by another driver"):
        driver.run(job)
    assert not storage.exists(RUN_JSON)
    assert storage.read_bytes("_run/samples/part-00000.parquet") == b"the newer driver's"


def test_another_models_norm_does_not_stay(job: ExtractJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that committed nothing, in the same output; this model's norm is none that a reader could apply."""
    start(job)
    storage = open_storage(str(job.output.path))
    assert storage.exists(FINAL_NORM)

    def none(model: Any) -> None:
        raise UnsupportedError("its final norm has a bias")

    monkeypatch.setattr(driver, "final_norm", none)
    job.capture.final = Final.post_norm
    start(job)
    assert run_json(job)["spec"]["final"] == "post_norm" and not storage.exists(FINAL_NORM)


def test_shards_without_a_run_json_are_refused(job: ExtractJob) -> None:
    """Nothing says which samples they are of: another `output.shard_bytes` gives other units."""
    start(job)
    storage = open_storage(str(job.output.path))
    storage.write(marker_path(0), b"{}")
    storage.remove(RUN_JSON)
    with pytest.raises(OutputError, match="no _run/run.json that says which samples they are of"):
        driver.run(job)
    assert storage.exists(marker_path(0))


def test_a_resume_makes_a_lost_norm_again(job: ExtractJob, capsys: pytest.CaptureFixture[str]) -> None:
    start(job)
    storage = open_storage(str(job.output.path))
    before = load_final_norm(storage)
    storage.remove(FINAL_NORM)
    job.output.shard_bytes = "1MB"
    start(job)
    assert torch.equal(load_final_norm(storage).weight, before.weight)
    assert "output.shard_bytes = 1MB: the plan that was made with 1GiB is kept" in capsys.readouterr().out


def test_a_resume_does_not_keep_another_models_norm(job: ExtractJob) -> None:
    """Its file is in order in itself, and the manifest to come would name it."""
    start(job)
    storage = open_storage(str(job.output.path))
    right = load_final_norm(storage)
    other = right.weight.flip(0) + 1
    facts = {"eps": repr(right.eps), "kind": right.kind, "sha256": norm_digest(other, right.eps, right.kind)}
    storage.write(FINAL_NORM, save({"weight": other}, metadata=facts))
    assert torch.equal(load_final_norm(storage).weight, other)
    start(job)
    assert torch.equal(load_final_norm(storage).weight, right.weight)


def commit(job: ExtractJob, unit: int, size: int = 1000) -> None:
    """A shard of so many bytes and its marker, of four tokens."""
    run, storage = run_json(job), open_storage(str(job.output.path))
    shard = f"{SHARDS}/unit-{unit:06d}-0001-aa.parquet"
    storage.write(shard, bytes(size))
    marker = Marker(unit, "0001-aa", 1, run["fingerprint"], shard, size, "", samples=1, rows=1, tokens=4)
    storage.write(marker_path(unit), marker.to_json().encode())


def test_a_dry_run_refuses_what_a_run_would(job: ExtractJob, tiny_llama: Path) -> None:
    """Naming the keys that differ, and no other: it has not read the weights, and has no digest of them."""
    start(job)
    commit(job, 0)
    model, layers = job.model.path, job.layers
    job.layers, job.dry_run = [1], True
    with pytest.raises(OutputError, match=r"made by another configuration.*differs:\n  layers = \[1\] \(was [^\n]*$"):
        driver.run(job)
    job.layers, job.model.path = layers, str(tiny_llama)  # of another width
    with pytest.raises(OutputError, match=r"made by another configuration.*\n  model\.path = "):
        driver.run(job)
    job.model.path, job.output.on_existing = model, OnExisting.fail
    with pytest.raises(OutputError, match=r"output\.on_existing = fail"):
        driver.run(job)


def test_a_dry_run_of_a_half_done_run_tells_what_is_left(job: ExtractJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.output.shard_bytes = "5kB"
    start(job)
    commit(job, 0)
    commit(job, 1)
    files = sorted(Path(str(job.output.path)).rglob("*"))
    capsys.readouterr()
    job.dry_run, job.cluster.tokens_per_second = True, 19.0
    assert driver.run(job) == 0
    said = capsys.readouterr().out
    units = run_json(job)["plan"]["units"]
    assert f"resuming: 2 of {units} units are committed" in said and units > 2
    assert "time       1 s at 19 tokens/s" in said, "19 of 27 tokens are left"
    assert "planning:" not in said, "the plan is there"
    assert sorted(Path(str(job.output.path)).rglob("*")) == files, "nothing is written"


def test_a_dry_run_counts_what_is_there_as_room(job: ExtractJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that fills half a disk fits onto it: its first half is there already."""
    job.output.shard_bytes = "5kB"
    start(job)
    job.dry_run = True
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 20_000)
    with pytest.raises(OutputError, match="are free"):
        driver.run(job)
    commit(job, 0, 20_000)  # of 34,000
    assert driver.run(job) == 0


def test_a_dry_run_of_a_complete_run_needs_no_room(job: ExtractJob) -> None:
    start(job)
    for unit in range(run_json(job)["plan"]["units"]):
        commit(job, unit)
    job.dry_run, job.output.min_free_bytes = True, "900TB"
    assert driver.run(job) == 0


@pytest.fixture
def of_the_hub(job: ExtractJob, tmp_path: Path, tiny_random: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The job's model at the hub, where its only commit is 111..."""
    hub = Hub(tmp_path / "hub", monkeypatch)
    hub.push(tiny_random, "1")
    job.model.path = hub.name
    return hub


def test_the_engines_get_the_commit_that_the_driver_found(
    job: ExtractJob, of_the_hub: Hub, tiny_random: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that starts again after a push would find other weights, and refuse them."""
    given: list[ActorJob] = []

    def pushed(extraction: Any) -> Iterator[Marker]:
        given.append(extraction.job)
        of_the_hub.push(tiny_random, "2")
        raise RunError("the engine could not load the model")
        yield

    monkeypatch.setattr(remaining, "extract_units", pushed)
    start(job)
    [actor] = given
    assert resolve_model(actor.model).revision == "1" * 40 and resolve_model(actor.model).digest == actor.model_digest
    assert run_json(job)["config"]["model"]["revision"] is None, "as the user gave it"


def test_scratch_is_for_the_largest_unit_of_the_plan(job: ExtractJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for `output.shard_bytes`, which one long sample exceeds, and which a resume may be given anew."""
    given: list[ActorJob] = []

    def engine_fails(extraction: Any) -> Iterator[Marker]:
        given.append(extraction.job)
        raise RunError("the engine could not load the model")
        yield

    monkeypatch.setattr(remaining, "extract_units", engine_fails)
    for shard_bytes in ("5kB", "1GiB"):
        job.output.shard_bytes = shard_bytes
        start(job)
    tokens = run_json(job)["plan"]["largest_unit_tokens"]
    needed = 4 * tokens * (given[0].options.spec.bytes_per_token + 8)  # four units at once
    assert tokens == 6 and [actor.scratch_bytes for actor in given] == [needed, needed]


def test_a_resume_goes_on_with_the_commit_that_it_began_with(
    job: ExtractJob, of_the_hub: Hub, tiny_random: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.output.shard_bytes = "5kB"
    start(job)
    commit(job, 0)
    before = run_json(job)
    of_the_hub.push(tiny_random, "2")
    start(job)
    assert f"going on with the commit {'1' * 40}, which this run began with" in capsys.readouterr().out
    assert run_json(job) == before
    job.dry_run = True
    assert driver.run(job) == 0
    job.dry_run, job.model.revision = False, "2" * 40  # the user's word counts
    with pytest.raises(OutputError, match=r"made by another configuration.*\n  model\.path = "):
        driver.run(job)


def test_a_run_that_committed_nothing_takes_the_newest_commit(
    job: ExtractJob, of_the_hub: Hub, tiny_random: Path
) -> None:
    """The push may have mended what kept it from starting."""
    start(job)
    of_the_hub.push(tiny_random, "2")
    start(job)
    assert run_json(job)["model"]["revision"] == "2" * 40


def test_rejected_lines_are_counted_once(job: ExtractJob) -> None:
    start(job)
    assert COUNTED == [("driver", 1)]
    start(job)  # resumes
    assert COUNTED == [("driver", 1)]


def test_the_readers_end_with_the_planning_that_failed(job: ExtractJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the traceback goes, after Ray's end: ending them then would start a Ray cluster."""
    ended: list[str] = []

    def tables(*_: Any) -> Iterator[pa.Table]:
        try:
            yield pa.table({"input_ids": pa.array([[1]])})
        finally:
            ended.append("readers")

    def fails(storage: Any, tables: Iterator[pa.Table], *_: Any) -> None:
        next(tables)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(driver.planning, "read_tables", tables)
    monkeypatch.setattr(driver, "build_plan", fails)
    monkeypatch.setattr(driver.cluster, "disconnect", lambda: ended.append("ray"))
    with pytest.raises(RunError, match="Input/output") as caught:
        driver.run(job)
    assert ended == ["readers", "ray"] and caught.tb is not None


def test_an_outage_is_one_message(job: ExtractJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and no traceback: where in our code a disk or a store failed helps nobody."""

    def fails(storage: Any) -> None:
        raise OSError(5, "s3://b/x: head_object: still failing after 600 s")

    monkeypatch.setattr(driver.MarkerIndex, "replace", lambda self, markers: fails(self))
    with pytest.raises(RunError, match=r"^the run failed: OSError: .*600 s; run the same command again") as caught:
        driver.run(job)
    assert caught.value.exit_code == 1 and caught.value.plain


def test_an_outage_that_a_reader_met_comes_without_rays_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(reference: Any) -> None:
        raise driver.ray.exceptions.RayTaskError("read", "ray::_Reader.read()", OSError(5, "Input/output error"))

    monkeypatch.setattr(driver.planning.ray, "get", fails)
    with pytest.raises(OSError, match=r"^\[Errno 5\] Input/output error$"):
        driver.planning._get(None)


def test_the_engines_end_before_the_driver_goes(job: ExtractJob, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def lost(self: Any) -> None:
        raise RunError("another driver took over")

    def units(extraction: Any) -> Iterator[Marker]:
        monkeypatch.setattr(driver.Lease, "check", lost)
        try:
            yield Marker(0, "0001-a", 1, "f", None, 0, "", 0, 0, 0)
        finally:
            ended.append("engines")

    monkeypatch.setattr(remaining, "extract_units", units)
    monkeypatch.setattr(remaining, "INDEX_S", -1.0)
    monkeypatch.setattr(driver.cluster, "disconnect", lambda: ended.append("ray"))
    with pytest.raises(RunError, match="took over") as caught:
        driver.run(job)
    assert ended == ["engines", "ray"] and caught.tb is not None


def test_readers_are_not_killed_after_rays_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.planning.ray, "kill", lambda reader: pytest.fail("ray.kill starts a cluster"))
    monkeypatch.setattr(driver.planning.ray, "is_initialized", lambda: False)
    driver.planning._Readers.end(SimpleNamespace(_at_work={object(): 1}, _starting={}))  # type: ignore[arg-type]
