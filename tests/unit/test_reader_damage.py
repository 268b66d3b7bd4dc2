"""hs_ray.reader on outputs that are incomplete or damaged: one message that names the file, and no sample."""

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from make_output import FAILED, MadeOutput, flip_byte, make_output
from safetensors.torch import save_file
from test_reader import bits, ids

from hs_ray import schema
from hs_ray.errors import OutputError, ShardError
from hs_ray.reader import HiddenStatesDataset
from hs_ray.storage import LocalStorage
from hs_ray.weights import norm_digest


@pytest.fixture
def made(both_output: MadeOutput) -> MadeOutput:
    """Shared: what damages it takes `copy`."""
    return both_output


def test_no_output(tmp_path: Path):
    with pytest.raises(OutputError, match=r"no _run/run\.json there"):
        HiddenStatesDataset(str(tmp_path))


def test_a_path_that_is_no_folder(tmp_path: Path):
    """Nor is it a fault of hs_ray, whose traceback would be shown."""
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "file", "Not a directory"), (tmp_path / ("x" * 300), "File name too long")):
        with pytest.raises(OutputError) as caught:
            HiddenStatesDataset(str(path))
        assert str(caught.value) == (
            f"output.path = {path}: _run/run.json there cannot be read ({reason}); check the path, and the rights to "
            "what is in it"
        )


def test_a_folder_that_is_not_ours_to_read(made: MadeOutput, monkeypatch: pytest.MonkeyPatch):
    def size(*_: Any) -> int:  # root, as whom tests may run, is refused nothing
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalStorage, "size", size)
    with pytest.raises(OutputError, match=r"output\.path = .*/out: .*\(Permission denied\)"):
        HiddenStatesDataset(str(made.path))


@pytest.mark.parametrize("job", ["verify", "describe", "export"])
def test_the_jobs_say_that_a_path_is_no_folder(tmp_path: Path, job: str):
    (tmp_path / "file").write_text("")
    script = str(Path(__file__).parents[2] / "jobs" / f"{job}.py")
    more = [f"export.path={tmp_path / 'x'}"] if job == "export" else []
    command = [sys.executable, script, f"output.path={tmp_path / 'file'}", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().startswith(f"output.path = {tmp_path / 'file'}: ") and "Traceback" not in done.stderr


def test_incomplete_needs_the_flag(made: MadeOutput, copy: Path):
    (copy / schema.MANIFEST).unlink()
    (copy / schema.marker_path(1)).unlink()
    with pytest.raises(OutputError, match=r"not complete .* with incomplete=True$"):
        HiddenStatesDataset(str(copy))
    got = ids(HiddenStatesDataset(str(copy), incomplete=True))
    assert got == [made.samples[i].sample_id for i in made.committed if i // 4 != 1]
    assert made.samples[FAILED].sample_id not in got


def test_missing_marker(copy: Path):
    (copy / schema.marker_path(1)).unlink()
    with pytest.raises(ShardError, match=r"_run/done/unit-000001\.json: missing"):
        HiddenStatesDataset(str(copy))


def test_damaged_marker(copy: Path):
    (copy / schema.MANIFEST).unlink()
    (copy / schema.marker_path(1)).write_text("{")
    with pytest.raises(ShardError, match=r"unit-000001\.json: damaged marker"):
        HiddenStatesDataset(str(copy), incomplete=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.update(samples=0), "says 0 samples, 4 rows"),
        (lambda m: m.update(samples=-1), "says -1 samples"),
        (lambda m: m.update(samples=10**30), "says 1000000000000000000000000000000 samples"),
        (lambda m: m.update(samples=10**30, checksums={}), "says 1000000000000000000000000000000 samples"),
        (lambda m: m.update(samples=3), "says 3 samples and has checksums of 4"),
        (lambda m: m.update(rows=1), "says 4 samples, 1 rows"),
        (lambda m: m.update(tokens=-5), ".*-5 tokens"),
        (lambda m: m.update(shard=None), "names no shard for 4 samples"),
        (lambda m: m.update(shard=None, samples=0, rows=0, tokens=0, bytes=0), "says 0 samples and has checksums of 4"),
        (lambda m: m.update(shard=schema.shard_path(0, "0001-aaaa")), r"names shards/unit-000000-.* of unit-000002"),
    ],
)
def test_numbers_of_a_marker_that_cannot_be(copy: Path, change: Callable[[Any], object], told: str):
    (copy / schema.MANIFEST).unlink()
    edit_json(copy / schema.marker_path(2), change)
    with pytest.raises(ShardError, match=rf"_run/done/unit-000002\.json: damaged, it {told}"):
        HiddenStatesDataset(str(copy), incomplete=True)


def test_markers_of_before_there_were_checksums(made: MadeOutput, copy: Path):
    (copy / schema.MANIFEST).unlink()
    for unit in range(3):
        edit_json(copy / schema.marker_path(unit), lambda m: m.pop("checksums"))
    assert len(HiddenStatesDataset(str(copy), incomplete=True)) == len(made.committed)


@pytest.mark.parametrize("incomplete", [False, True])
def test_foreign_file(copy: Path, incomplete: bool):
    pq.write_table(pa.table({"a": [1]}), copy / "shards/mine.parquet")
    if incomplete:
        (copy / schema.MANIFEST).unlink()
    with pytest.raises(ShardError, match=r"shards/mine\.parquet: a foreign file"):
        HiddenStatesDataset(str(copy), incomplete=incomplete)


def test_missing_and_cut_shard(made: MadeOutput, copy: Path):
    path = copy / schema.shard_path(1, "0001-aaaa")
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(
        ShardError, match=r"unit-000001-0001-aaaa\.parquet: damaged, \d+ bytes where \d+ were committed"
    ):
        HiddenStatesDataset(str(copy))
    path.write_bytes(bytes(len(data)))
    with pytest.raises(ShardError, match=r"unit-000001-0001-aaaa\.parquet: not a readable Parquet file"):
        list(HiddenStatesDataset(str(copy)))
    path.unlink()
    with pytest.raises(ShardError, match=r"unit-000001-0001-aaaa\.parquet: missing"):
        HiddenStatesDataset(str(copy))


def test_damaged_length_inside_a_shard(copy: Path):
    path = copy / schema.shard_path(0, "0001-aaaa")
    row_group = pq.ParquetFile(path).metadata.row_group(0)
    last = row_group.column(row_group.num_columns - 1)
    flip_byte(path, last.data_page_offset + last.total_compressed_size - 40 * 64 * 2 - 3)  # in the value's length
    with pytest.raises(ShardError, match=r"unit-000000-0001-aaaa\.parquet: damaged, row 0, column final_post_norm"):
        HiddenStatesDataset(str(copy))[0]


def test_shard_of_another_run(made: MadeOutput, copy: Path):
    run = copy / schema.RUN_JSON
    run.write_text(run.read_text().replace("f" * 64, "e" * 64))
    with pytest.raises(ShardError, match="another configuration"):
        HiddenStatesDataset(str(copy))[0]


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["shards"].append(m["shards"][0]), r"it names unit-000000 2 times"),
        (lambda m: m["shards"][2].update(unit=7), r"it names unit-000007, counts\.units is 3"),
        (
            lambda m: m["shards"][2].update(path=m["shards"][0]["path"]),
            r"it names shards/unit-000000-0001-aaaa\.parquet",
        ),
        (lambda m: m["shards"].pop(), r"its shards have 7 samples, counts\.committed is 11"),
        (lambda m: m["counts"].pop("units"), r"counts\.units and counts\.committed must be whole numbers"),
        (lambda m: m["counts"].update(committed="11"), r"counts\.units and counts\.committed must be whole numbers"),
        (lambda m: m.pop("counts"), r"counts\.units and counts\.committed must be whole numbers"),
        (lambda m: m.pop("shards"), r"shards a list"),
        (lambda m: m["shards"][1].pop("unit"), r"shards\[1\]\.unit is missing"),
        (lambda m: m["shards"][1].update(samples="3"), r"shards\[1\]\.samples is '3'"),
        (lambda m: m["shards"][1].update(samples=-3), r"shards\[1\]\.samples is -3"),
        (lambda m: m["shards"].insert(0, None), r"shards\[0\] is None"),
    ],
)
def test_damaged_manifest(copy: Path, change: Callable[[Any], object], told: str):
    edit_json(copy / schema.MANIFEST, change)
    with pytest.raises(ShardError, match=rf"out/manifest\.json: damaged, .*{told}"):
        HiddenStatesDataset(str(copy))


def test_a_job_tells_damage_in_one_message(copy: Path):
    edit_json(copy / schema.MANIFEST, lambda m: m["shards"].pop())
    job = Path(__file__).parents[2] / "jobs" / "describe.py"
    done = subprocess.run([sys.executable, job, f"output.path={copy}"], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.strip().startswith(f"{copy}/manifest.json: damaged, its shards have 7 samples")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.clear(), "fingerprint, config.output.compression, spec.layers, spec.final"),
        (lambda r: r.update(config=None), "config.output.compression"),
        (lambda r: r["spec"].update(layers=[2, 4]), "spec.layers"),
        (lambda r: r["spec"].update(final="norm"), "spec.final"),
        (lambda r: r["spec"].update(hidden_size=None), "spec.hidden_size"),
    ],
)
def test_foreign_run_json(copy: Path, change: Callable[[Any], object], told: str):
    edit_json(copy / schema.RUN_JSON, change)
    with pytest.raises(OutputError, match=rf"_run/run\.json is not one of hs_ray's, or damaged: no usable {told}"):
        HiddenStatesDataset(str(copy))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (b'{"byte_order"', b'{\xe2byte_order"', r"damaged \("),  # no longer UTF-8
        (b'{"byte_order"', b'{*byte_order"', r"damaged \("),  # no longer JSON
        (b'"hidden_size"', b'"hadden_size"', "no usable hidden_size in its footer"),
        (b'"hidden_size": 64', b'"hidden_size": 65', "hidden_size 65, the run's is 64"),
        (b'"compression": "none"', b'"compression": "nonf"', "compression 'nonf', the run's is 'none'"),
        (b"hidden_2", b"hid\xe4en_2", "not a readable Parquet file"),
    ],
)
def test_damaged_footer(copy: Path, before: bytes, after: bytes, told: str):
    path = copy / schema.shard_path(0, "0001-aaaa")
    damage_footer(path, before, after)
    with pytest.raises(ShardError, match=rf"unit-000000-0001-aaaa\.parquet: .*{told}"):
        HiddenStatesDataset(str(copy))[0]


def damage_footer(path: Path, before: bytes, after: bytes) -> None:
    """Replace the first `before` in the Parquet footer itself; Arrow's own schema in it is base64."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert before in data[start:]
    path.write_bytes(data[:start] + data[start:].replace(before, after, 1))


@pytest.mark.parametrize("compression", ["none", "split_zstd"])
def test_a_codec_that_there_is_none_of_never_ends_the_process(tmp_path: Path, compression: str):
    made = make_output(tmp_path / "out", compression=compression)
    name = b"hidden_2_lo" if compression == "split_zstd" else b"hidden_2"
    # Thrift: the column's path, then field `codec`, a zigzag number: 0 is uncompressed, 16 is codec 8.
    damage_footer(made.shard(0), name + b"\x15\x00", name + b"\x15\x10")
    code = f"""
import hs_ray.reader
from hs_ray.errors import ShardError
try:
    print(int(hs_ray.reader.HiddenStatesDataset({str(made.path)!r})[0]["hidden_2"].view(hs_ray.reader.torch.int16).sum()))
except ShardError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if compression == "none":  # the bytes are read where they lie, and are right
        assert int(result.stdout) == made.states[0]["hidden_2"].view(np.int16).sum(dtype=np.int64)
    else:
        assert "unit-000000-0001-aaaa.parquet: damaged" in result.stdout


def rewrite_rows(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Write a shard again with other rows, the manifest's size with it."""
    table, size = pq.read_table(path), path.stat().st_size
    rows = table.to_pylist()
    change(rows)
    fields = [field.with_nullable(True) for field in table.schema]
    table = pa.Table.from_pylist(rows, schema=pa.schema(fields, metadata=table.schema.metadata))
    pq.write_table(table, path, compression="none", row_group_size=1)
    manifest = path.parents[1] / schema.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"bytes": {size}', f'"bytes": {path.stat().st_size}'))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[1]["input_ids"].__setitem__(2, None), "row 1 has a null in column input_ids"),
        (lambda rows: rows[1]["loss_mask"].__setitem__(0, None), "row 1 has a null in column loss_mask"),
        (lambda rows: rows[1].update(input_ids=None), "row 1 has a null in column input_ids"),
        (lambda rows: rows[1].update(num_tokens=None), "row 1 has a null in column num_tokens"),
        (lambda rows: rows[1].update(sample_id=None), "row 1 has a null in column sample_id"),
        (
            lambda rows: rows[1].update(input_ids=[], loss_mask=[], num_tokens=0, sample_tokens=0, hidden_2=b""),
            "row 1 has 0 tokens",
        ),
    ],
)
def test_nulls_and_rows_without_tokens(made: MadeOutput, copy: Path, change: Callable[[Any], object], told: str):
    rewrite_rows(copy / schema.shard_path(0, "0001-aaaa"), change)
    dataset = HiddenStatesDataset(str(copy))
    assert np.array_equal(bits(dataset[0]["hidden_2"]), made.states[0]["hidden_2"])
    with pytest.raises(ShardError, match=rf"unit-000000-0001-aaaa\.parquet: damaged, {told}"):
        dataset[1]


def test_a_shard_that_begins_inside_a_sample(copy: Path):
    path = copy / schema.shard_path(0, "0001-aaaa")
    rewrite_rows(path, lambda rows: (rows[0].update(token_start=3), rows.append(rows[1] | {"sample_id": "more"})))
    with pytest.raises(ShardError, match=r"unit-000000-0001-aaaa\.parquet: damaged, begins in the middle of a sample"):
        HiddenStatesDataset(str(copy))[0]


@pytest.mark.parametrize(
    ("weight", "metadata", "told"),
    [
        (64, {"eps": "1e-06"}, r"damaged \(KeyError\('kind'\)\)"),
        (64, {"eps": "small", "kind": "rms_norm"}, r"damaged \(ValueError"),
        (
            64,
            {"eps": "1e-06", "kind": "rms_norm", "sha256": "0" * 64},
            "its weight, eps or kind is not what was written",
        ),
        (1, {"eps": "1e-06", "kind": "rms_norm"}, r"its weight is \[1\], hidden_size 64"),  # would fit any width
    ],
)
def test_damaged_final_norm(copy: Path, weight: int, metadata: dict[str, str], told: str):
    save_file({"weight": torch.ones(weight)}, copy / schema.FINAL_NORM, metadata=metadata)
    dataset = HiddenStatesDataset(str(copy))
    with pytest.raises(ShardError, match=rf"_run/final_norm\.safetensors: .*{told}"):
        dataset.to_post_norm(dataset[0]["final_pre_norm"])
    (copy / schema.FINAL_NORM).write_bytes(b"\xff" * 100)
    with pytest.raises(ShardError, match=r"_run/final_norm\.safetensors: damaged"):
        dataset.to_post_norm(dataset[0]["final_pre_norm"])


def test_the_norm_of_another_model(copy: Path):
    """In order in itself, and of the same width."""
    ours, other = torch.ones(64), torch.full((64,), 2.0)
    digests = [norm_digest(weight, 1e-6, "rms_norm") for weight in (ours, other)]
    edit_json(copy / schema.MANIFEST, lambda m: m.update(final_norm=digests[0]))
    for weight, digest in zip((ours, other), digests, strict=True):
        facts = {"eps": "1e-06", "kind": "rms_norm", "sha256": digest}
        save_file({"weight": weight}, copy / schema.FINAL_NORM, metadata=facts)
        dataset = HiddenStatesDataset(str(copy))
        if weight is ours:
            dataset.to_post_norm(ours)
    with pytest.raises(
        ShardError, match=r"_run/final_norm\.safetensors: not the norm of this run, manifest\.json names"
    ):
        dataset.to_post_norm(ours)
    edit_json(copy / schema.MANIFEST, lambda m: m.pop("final_norm"))  # as earlier releases left it
    dataset.to_post_norm(ours)


def test_a_shard_under_another_units_name(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path))
    file = dataset._open(0)
    file.metadata["unit"] = 1
    with pytest.raises(ShardError, match="holds unit 1 under the name of unit 0's shard"):
        dataset._check_footer(file, 0)


def test_names_that_are_no_text(made: MadeOutput, copy: Path):
    path = copy / schema.shard_path(0, "0001-aaaa")
    data, name = path.read_bytes(), made.samples[1].sample_id.encode()
    assert name in data
    path.write_bytes(data.replace(name, b"\xff" + name[1:], 1))
    with pytest.raises(ShardError, match=r"unit-000000-0001-aaaa\.parquet: damaged"):
        list(HiddenStatesDataset(str(copy)))


@pytest.mark.parametrize("compression", ["none", "split_zstd"])
def test_a_row_group_without_its_row(tmp_path: Path, compression: str):
    """Out of a sequence an IndexError would be the end of the samples."""
    made = make_output(tmp_path / "out", compression=compression)
    path, size = made.shard(0), made.shard(0).stat().st_size
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema, compression="none") as writer:
        for part in (table[:2], table[2:3], table[3:], table[:0]):
            writer.write_table(part)
    manifest = made.path / schema.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"bytes": {size}', f'"bytes": {path.stat().st_size}'))
    with pytest.raises(ShardError, match=r"unit-000000-0001-aaaa\.parquet: damaged"):
        HiddenStatesDataset(str(made.path))[3]


def test_a_footer_that_is_no_object(copy: Path):
    path = copy / schema.shard_path(0, "0001-aaaa")
    text = pq.read_metadata(path).metadata[schema.METADATA_KEY]
    damage_footer(path, text, b"[" + b" " * (len(text) - 2) + b"]")
    with pytest.raises(ShardError, match=r"unit-000000-0001-aaaa\.parquet: damaged, what its footer says"):
        HiddenStatesDataset(str(copy))[0]


@pytest.mark.parametrize("name", [schema.MANIFEST, schema.RUN_JSON, schema.FINAL_NORM])
def test_a_folder_in_place_of_a_file(copy: Path, name: str):
    (copy / name).unlink()
    (copy / name).mkdir()
    with pytest.raises(ShardError, match=rf"{re.escape(name)}: a folder where a file should be"):
        HiddenStatesDataset(str(copy)).to_post_norm(torch.ones(64))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_datasets_that_are_dropped_leave_no_descriptor(made: MadeOutput, copy: Path):
    run = copy / schema.RUN_JSON
    run.write_text(run.read_text().replace("f" * 64, "e" * 64))
    foreign, errors = HiddenStatesDataset(str(copy)), []
    before = descriptors()
    for _ in range(3):
        assert ids(HiddenStatesDataset(str(made.path)))
        with pytest.raises(ShardError, match="another configuration") as error:
            foreign[0]
        errors.append(error)  # a traceback that is kept has the file in its frames
    assert descriptors() == before


def test_a_later_format(copy: Path):
    edit_json(copy / schema.RUN_JSON, lambda run: run.update(format_version=2))
    with pytest.raises(OutputError, match="has format 2, this hs_ray reads 1; read it with the release that made it"):
        HiddenStatesDataset(str(copy))
