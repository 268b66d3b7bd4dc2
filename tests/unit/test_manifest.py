"""Markers -> manifest: what is trusted, what is cleared away, and that lines and samples add up."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commit import FINGERPRINT, SPEC, attempt
from s3 import Bucket
from safetensors.torch import save

from hs_ray.errors import HsRayError, LostLeaseError, OutputError
from hs_ray.lease import Lease, begin_attempt
from hs_ray.manifest import (
    MarkerIndex,
    build_manifest,
    clean_leftovers,
    drop_untrusted,
    list_markers,
    read_markers,
)
from hs_ray.schema import ColumnStats, Marker, Reject, layer_spellings
from hs_ray.storage import Storage, open_storage
from hs_ray.storage.s3_requests import S3Requests


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.integration)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return request.getfixturevalue("s3").storage()
    return open_storage(str(tmp_path))


def run_json(units: int, **plan: Any) -> dict[str, Any]:
    counts = {"units": units, "samples": 3 * units, "lines": 3 * units, "blank": 0, "rejected": 0}
    return {
        "fingerprint": FINGERPRINT,
        "model": {"name": "tiny", "revision": None},
        "spec": {
            "layers": layer_spellings(SPEC.layers),
            "final": SPEC.final,
            "num_hidden_layers": SPEC.num_hidden_layers,
            "hidden_size": SPEC.hidden_size,
        },
        "plan": counts | {"rejects_by_code": {}} | plan,
    }


def write_rejected(storage: Storage, rejects: list[Reject]) -> None:
    columns = pa.schema([(n, pa.int64() if n == "line" else pa.string()) for n in Reject.__dataclass_fields__])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([vars(reject) for reject in rejects], columns), sink)
    storage.write("_run/rejected.parquet", sink.getvalue().to_pybytes())


def make_marker(unit: int, **changes: Any) -> Marker:
    marker = Marker(
        unit=unit,
        attempt="0001-0000000a",
        epoch=1,
        fingerprint=FINGERPRINT,
        shard=f"shards/unit-{unit:06d}-0001-0000000a.parquet",
        bytes=1,
        sha256="0" * 64,
        samples=3,
        rows=3,
        tokens=30,
        columns={name: ColumnStats(rows=30) for name in SPEC.columns},
    )
    return replace(marker, **changes)


# --- which markers count ---


def test_markers_that_do_not_count(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    kept = attempt(storage, 0, "0001-0000000a")
    for unit, reason in {1: "missing", 2: "of another size", 3: "of another run", 4: "no marker"}.items():
        marker = attempt(storage, unit, "0001-0000000a")
        path = f"_run/done/unit-{unit:06d}.json"
        if reason == "missing":
            storage.remove(str(marker.shard))
        if reason == "of another size":
            storage.write(str(marker.shard), b"torn")
        if reason == "of another run":
            storage.write(path, replace(marker, fingerprint="other").to_json().encode())
        if reason == "no marker":
            storage.write(path, b'{"half": ')
    assert read_markers(storage, FINGERPRINT) == {0: kept}
    for text in ("which is missing", "has 4 bytes, not", "by another configuration", "not a marker of this format"):
        assert text in caplog.text
    assert list(list_markers(storage)) == [0, 1, 2, 3, 4]
    assert drop_untrusted(storage, 1, FINGERPRINT) == {0: kept}
    assert list(list_markers(storage)) == [0]


@pytest.mark.integration
def test_ten_thousand_markers_are_few_requests(s3: Bucket) -> None:
    """A resume with the index that the driver kept; the last of it was not written."""
    units, indexed = 10_000, 9_900
    storage = s3.storage()
    markers = {unit: make_marker(unit) for unit in range(units)}
    for unit, marker in markers.items():
        s3.put(f"shards/unit-{unit:06d}-0001-0000000a.parquet", b"x")
        s3.put(f"_run/done/unit-{unit:06d}.json", marker.to_json().encode())
    time.sleep(1.1)  # S3 stamps whole seconds
    index = MarkerIndex(storage)
    for unit in range(indexed):
        index.add(markers[unit])
    index.flush()
    s3.requests.clear()
    start = time.monotonic()
    assert read_markers(storage, FINGERPRINT) == markers
    took = time.monotonic() - start
    kinds = {
        kind: sum(kind in line for line in s3.requests) for kind in ("list-type", "/_run/done/unit", "/_run/index/")
    }
    print(f"{units} markers: {len(s3.requests)} requests, {took:.1f} s")
    assert kinds == {"list-type": 10 + 10 + 1, "/_run/done/unit": units - indexed, "/_run/index/": 10}
    assert took < 60


def test_the_index_never_outvotes_a_marker(storage: Storage) -> None:
    """A marker that was replaced after the index was written, one that is gone, and one named twice."""
    index = MarkerIndex(storage)
    for unit in range(4):
        storage.write(f"_run/done/unit-{unit:06d}.json", make_marker(unit).to_json().encode())
    time.sleep(0.01 if storage.is_local else 1.1)
    for unit in (0, 1, 2, 3):
        index.add(make_marker(unit))
    index.add(make_marker(3, attempt="0001-0000000b"))
    index.flush()
    newer = make_marker(1, attempt="0001-0000000c")
    storage.write("_run/done/unit-000001.json", newer.to_json().encode())
    storage.remove("_run/done/unit-000002.json")
    assert list_markers(storage) == {0: make_marker(0), 1: newer, 3: make_marker(3)}
    index.replace([make_marker(0)])
    assert len(storage.list("_run/index")) == 1
    assert list_markers(storage) == {0: make_marker(0), 1: newer, 3: make_marker(3)}


def test_a_damaged_index_is_passed_over(tmp_path: Path) -> None:
    """It is only a copy; a marker with a field of another type is none, wherever it stands."""
    storage = open_storage(str(tmp_path))
    for unit in range(3):
        storage.write(f"_run/done/unit-{unit:06d}.json", make_marker(unit).to_json().encode())
    storage.write("_run/done/unit-000002.json", make_marker(2, samples="3").to_json().encode())
    index = MarkerIndex(storage)
    index.add(make_marker(0, tokens=None))
    index.flush()
    storage.write("_run/index/0.jsonl", b"{\n[]\n")
    assert list_markers(storage) == {0: make_marker(0), 1: make_marker(1), 2: None}


@pytest.mark.parametrize("field", ["bytes", "tokens", "samples"])
@pytest.mark.parametrize("checksum", [True, False], ids=["", "of an earlier release"])
def test_a_damaged_line_of_the_index_costs_no_unit(tmp_path: Path, field: str, checksum: bool) -> None:
    storage = open_storage(str(tmp_path))
    for unit in range(3):
        attempt(storage, unit, "0001-0000000a")
    run = run_json(3)
    markers = read_markers(storage, FINGERPRINT)
    manifest = build_manifest(storage, run, markers)
    time.sleep(0.01)
    MarkerIndex(storage).replace(markers.values())
    [index] = storage.list("_run/index")
    lines = storage.read_bytes(index.path).decode().splitlines()
    if not checksum:
        lines = [json.dumps(json.loads(marker.to_json()), separators=(",", ":")) for marker in markers.values()]
    lines[1] = re.sub(rf'"{field}":(\d+)', lambda found: f'"{field}":{int(found[1]) + 1}', lines[1], count=1)
    storage.write(index.path, "\n".join(lines).encode())
    assert drop_untrusted(storage, 1, FINGERPRINT) == markers
    assert storage.exists("_run/done/unit-000001.json") and storage.exists("manifest.json")
    assert build_manifest(storage, run, read_markers(storage, FINGERPRINT)) == manifest


def test_the_index_is_read_instead_of_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    markers = {unit: attempt(storage, unit, "0001-0000000a") for unit in range(3)}
    time.sleep(0.01)
    MarkerIndex(storage).replace(markers.values())
    read: list[str] = []
    original = storage.read_many
    monkeypatch.setattr(storage, "read_many", lambda paths: read.extend(paths) or original(paths))
    assert list_markers(storage) == markers
    assert [path.rpartition("/")[0] for path in read] == ["_run/index"]


# --- leftovers ---


def test_leftovers(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    kept = attempt(storage, 0, "0001-0000000a")
    for path in (
        "shards/unit-000000-0001-0000000b.parquet",  # lost its race
        "shards/unit-000001-0001-0000000a.parquet",  # died before its marker
        "_run/tmp/unit-000001-0001-0000000c.parquet",
        "_run/tmp/0123456789abcdef.tmp",
        "shards/unit-000001-0003-0000000a.parquet",  # of a newer epoch
        "shards/notes.txt",
    ):
        storage.write(path, b"x")
    begin_attempt(storage, 1, 1, "engine 0")
    assert clean_leftovers(storage, 2, {0: kept}) == 5
    left = [info.path for folder in ("shards", "_run/tmp", "_run/attempts") for info in storage.list(folder)]
    assert left == ["shards/notes.txt", kept.shard, "shards/unit-000001-0003-0000000a.parquet"]
    assert "shards/notes.txt: not made by hs_ray" in caplog.text


def test_a_shard_committed_meanwhile_stays(storage: Storage) -> None:
    marker = attempt(storage, 0, "0001-0000000a")
    assert clean_leftovers(storage, 2, {}) == 0  # `markers` was read before a zombie committed
    assert storage.exists(str(marker.shard))


@pytest.mark.integration
def test_unfinished_uploads_are_leftovers(s3: Bucket) -> None:
    begin = "create_multipart_upload"
    s3.storage()._client._run(S3Requests.call, begin, Key="runs/out/shards/unit-000000-0001-aa.parquet")  # type: ignore[attr-defined]
    assert s3.uploads() == 1 and clean_leftovers(s3.storage(), 1, {}) == 1 and s3.uploads() == 0


def test_a_lost_lease_clears_nothing(storage: Storage) -> None:
    Lease.acquire(storage, 60, "a").release()
    Lease.acquire(storage, 60, "b")
    storage.write("shards/unit-000001-0001-0000000a.parquet", b"x")
    with pytest.raises(LostLeaseError):
        clean_leftovers(storage, 1, {})
    with pytest.raises(LostLeaseError):
        drop_untrusted(storage, 1, FINGERPRINT)
    assert len(storage.list("shards")) == 1


# --- the manifest ---


def test_manifest_of_a_complete_run(storage: Storage) -> None:
    for unit in range(3):
        attempt(storage, unit, "0001-0000000a", samples=0 if unit == 1 else 2)
    rejects = [Reject("dup", "a.jsonl", 4, "duplicate", "Größe"), Reject(None, "a.jsonl", 5, "json", "not JSON")]
    write_rejected(storage, rejects)
    storage.write("_rejects/failed-00007.jsonl", b"of an earlier, incomplete manifest")
    run = run_json(3, samples=7, lines=10, blank=1, rejected=2, rejects_by_code={"duplicate": 1, "json": 1})
    markers = read_markers(storage, FINGERPRINT)
    manifest = build_manifest(storage, run, markers)
    assert json.loads(storage.read_bytes("manifest.json")) == manifest
    assert manifest["complete"] is True and manifest["fingerprint"] == FINGERPRINT and manifest["model"] == "tiny"
    assert manifest["counts"] == {
        "lines": 10,
        "blank": 1,
        "rejected": 2,
        "rejects_by_code": {"duplicate": 1, "json": 1},
        "samples": 7,
        "units": 3,
        "committed": 4,
        "failed": 3,
        "tokens": 2800,
        "rows": 4,
        "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
    }
    assert [shard["unit"] for shard in manifest["shards"]] == [0, 2]
    assert manifest["shards"][0] == {
        "unit": 0, "path": markers[0].shard, "samples": 2, "rows": 2, "tokens": 1400,
        "bytes": markers[0].bytes, "sha256": markers[0].sha256}  # fmt: skip
    lines = [json.loads(line) for i in storage.list("_rejects") for line in storage.read_bytes(i.path).splitlines()]
    assert [(r["sample_id"], r["code"]) for r in lines] == [("s99", "nan")] * 3 + [("dup", "duplicate"), (None, "json")]


def test_the_manifest_names_the_final_norm(tmp_path: Path) -> None:
    storage, path = open_storage(str(tmp_path)), tmp_path / "_run/final_norm.safetensors"
    assert "final_norm" not in build_manifest(storage, run_json(0), {})  # a run may have none
    path.parent.mkdir(exist_ok=True)
    facts = {"eps": "1e-06", "kind": "rms_norm"}
    path.write_bytes(save({"weight": torch.ones(4)}, facts))
    assert "final_norm" not in build_manifest(storage, run_json(0), {})  # as earlier releases wrote it
    path.write_bytes(save({"weight": torch.ones(4)}, facts | {"sha256": "ab" * 32}))
    manifest = build_manifest(storage, run_json(0), {})
    assert manifest["final_norm"] == "ab" * 32 and json.loads(storage.read_bytes("manifest.json")) == manifest
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(OutputError, match=r"_run/final_norm\.safetensors is damaged .*; remove it and run"):
        build_manifest(storage, run_json(0), {})


def test_manifest_of_an_unfinished_run(storage: Storage) -> None:
    attempt(storage, 1, "0001-0000000a")
    manifest = build_manifest(storage, run_json(2), read_markers(storage, FINGERPRINT))
    assert (manifest["complete"], manifest["counts"]["committed"], len(manifest["shards"])) == (False, 2, 1)


def test_many_rejects_become_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_ray.manifest.build.REJECTS_PER_FILE", 2)
    storage = open_storage(str(tmp_path))
    write_rejected(storage, [Reject(None, "a", n, "json", "") for n in range(5)])
    build_manifest(storage, run_json(0, lines=5, rejected=5), {})
    assert [i.path for i in storage.list("_rejects")] == [f"_rejects/input-0000{n}.jsonl" for n in range(3)]


@pytest.mark.parametrize(
    ("plan", "markers", "message"),
    [
        ({"lines": 7}, [0, 1], "7 lines, but 6 samples + 0 rejected + 0 blank = 6"),
        ({"samples": 7, "lines": 7}, [0, 1], "7 planned, but 6 committed + 0 failed = 6"),
        ({"samples": 2, "lines": 2}, [0], "2 planned, but 3 committed + 0 failed = 3"),
        ({"lines": 7, "rejected": 1}, [0, 1], "rejected.parquet: 0 rejected lines, the plan says 1"),
    ],
)
def test_what_does_not_add_up_is_an_error(
    tmp_path: Path, plan: dict[str, int], markers: list[int], message: str
) -> None:
    storage = open_storage(str(tmp_path))
    write_rejected(storage, [])
    with pytest.raises(HsRayError, match=re.escape(message)):
        build_manifest(storage, run_json(2, **plan), {unit: make_marker(unit) for unit in markers})
    assert not storage.exists("manifest.json")
