"""hs_ray.reader on small outputs: values, order, sharding, resume, errors."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from make_output import FAILED, MadeOutput, flip_byte, make_output
from torch.utils.data import DataLoader

from hs_ray import schema
from hs_ray.errors import ConfigError, OutputError, ShardError
from hs_ray.reader import HiddenStatesDataset, collate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    return make_output(tmp_path_factory.mktemp("reader") / "out", final="both")


@pytest.fixture
def copy(made: MadeOutput, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made.path, tmp_path / "out"))


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


def ids(samples) -> list[str]:
    return [sample["sample_id"] for sample in samples]


def assert_equals_truth(dataset: HiddenStatesDataset, made: MadeOutput) -> None:
    samples = list(dataset)
    assert ids(samples) == [made.samples[i].sample_id for i in made.committed]
    for i, sample in zip(made.committed, samples, strict=True):
        assert sample["input_ids"].dtype == torch.int64 and sample["loss_mask"].dtype == torch.uint8
        assert np.array_equal(sample["input_ids"], made.samples[i].input_ids)
        assert np.array_equal(sample["loss_mask"], made.samples[i].loss_mask)
        assert (sample["source"], sample["line"]) == ("train.jsonl", made.samples[i].line)
        for name in made.spec.columns:
            assert sample[name].dtype == torch.bfloat16
            assert np.array_equal(bits(sample[name]), made.states[i][name]), name


def test_every_sample_bit_exact(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path))
    assert_equals_truth(dataset, made)
    assert len(dataset) == len(made.committed)
    assert dataset[3]["sample_id"] == dataset.map_style()[3]["sample_id"] == made.samples[3].sample_id
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_split_zstd_bit_exact(tmp_path: Path):
    made = make_output(tmp_path / "out", compression="split_zstd")
    assert_equals_truth(HiddenStatesDataset(str(made.path)), made)


@pytest.mark.parametrize("compression", ["none", "split_zstd"])
def test_pieces_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str):
    monkeypatch.setattr(schema, "MAX_CELL_BYTES", 50 * 64 * 2)  # 50 tokens
    made = make_output(tmp_path / "out", compression=compression, lengths=[40, 101, 50, 7, 150, 3])
    rows = sum(pq.ParquetFile(made.shard(unit)).num_row_groups for unit in (0, 1))
    assert rows == 1 + 3 + 1 + 1 + 3 + 1
    assert_equals_truth(HiddenStatesDataset(str(made.path)), made)


def test_chosen_columns_alone(made: MadeOutput):
    sample = HiddenStatesDataset(str(made.path), columns=["hidden_4"])[0]
    assert [name for name in sample if name.startswith(("hidden", "final"))] == ["hidden_4"]
    assert np.array_equal(bits(sample["hidden_4"]), made.states[0]["hidden_4"])
    with pytest.raises(ConfigError, match=r"hidden_7.* it has hidden_2, hidden_4, hidden_5, final_pre_norm"):
        HiddenStatesDataset(str(made.path), columns=["hidden_7"])


def test_post_norm_is_bit_exact(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path))
    for sample in dataset:
        assert torch.equal(dataset.to_post_norm(sample["final_pre_norm"]), sample["final_post_norm"])


def test_shards_rewritten_by_another_tool_are_read_through_the_decoder(made: MadeOutput, copy: Path):
    path = copy / schema.shard_path(0, "0001-aaaa")
    table, size = pq.read_table(path), path.stat().st_size
    pq.write_table(table, path, compression="zstd", row_group_size=1)
    manifest = copy / schema.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"bytes": {size}', f'"bytes": {path.stat().st_size}'))
    assert_equals_truth(HiddenStatesDataset(str(copy)), made)


def test_shuffle_depends_on_seed_and_epoch_alone(made: MadeOutput):
    path, plain = str(made.path), ids(HiddenStatesDataset(str(made.path)))
    first = ids(HiddenStatesDataset(path, shuffle=True, seed=1))
    assert sorted(first) == sorted(plain) and first != plain
    assert first == ids(HiddenStatesDataset(path, shuffle=True, seed=1))
    assert first != ids(HiddenStatesDataset(path, shuffle=True, seed=2))
    dataset = HiddenStatesDataset(path, shuffle=True, seed=1)
    assert ids(dataset) == ids(dataset) == first
    dataset.set_epoch(1)
    assert ids(dataset) != first
    narrow = ids(HiddenStatesDataset(path, shuffle=True, seed=1, window=1))  # within one shard at a time
    units = [int(name.removeprefix("id-")) // 4 for name in narrow]
    assert sum(a != b for a, b in zip(units, units[1:], strict=False)) == 2


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_without_loss_or_repeat(made: MadeOutput, world: int, shuffle: bool):
    shares = [HiddenStatesDataset(str(made.path), shuffle=shuffle, rank=r, world_size=world) for r in range(world)]
    got = [ids(share) for share in shares]
    assert [len(share) for share in shares] == [len(part) for part in got]
    assert sorted(sum(got, [])) == sorted(made.samples[i].sample_id for i in made.committed)
    even = [len(list(HiddenStatesDataset(str(made.path), rank=r, world_size=world, even=True))) for r in range(world)]
    assert set(even) == {11 // world}
    with pytest.raises(ConfigError, match="rank"):
        HiddenStatesDataset(str(made.path), rank=world, world_size=world)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_order_is_that_of_one_process(made: MadeOutput, workers: int):
    dataset = HiddenStatesDataset(str(made.path), shuffle=True, batch_size=2)
    expected = ids(dataset)
    loader = DataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=collate)
    assert [name for batch in loader for name in batch["sample_id"]] == expected
    dataset.set_epoch(1)
    assert [name for batch in loader for name in batch["sample_id"]] == ids(dataset) != expected


def test_living_workers_see_the_next_epoch(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path), shuffle=True)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    first = ids(loader)
    dataset.set_epoch(1)
    assert ids(loader) != first


def test_resume_in_mid_epoch(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path), shuffle=True, seed=3)
    expected = ids(dataset)
    iterator = iter(dataset)
    head = [next(iterator)["sample_id"] for _ in range(4)]
    state = dataset.state_dict()
    again = HiddenStatesDataset(str(made.path), shuffle=True)
    again.load_state_dict(state)
    assert head + ids(again) == expected
    assert ids(again) == expected  # the next pass is a whole one
    halves = [HiddenStatesDataset(str(made.path), shuffle=True, rank=r, world_size=2) for r in range(2)]
    for half in halves:
        half.load_state_dict(state)  # taken by one rank, continued by two
    assert sorted(sum((ids(half) for half in halves), head)) == sorted(expected)


def test_resume_behind_workers(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path), shuffle=True, batch_size=2)
    expected = ids(dataset)
    iterator = iter(DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=collate))
    head = [name for _ in range(3) for name in next(iterator)["sample_id"]]
    again = HiddenStatesDataset(str(made.path), shuffle=True, batch_size=2)
    again.load_state_dict(dataset.state_dict(consumed=6))
    assert head + ids(again) == expected


def test_state_of_other_data_is_refused(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path))
    with pytest.raises(ConfigError, match="5 samples"):
        dataset.load_state_dict({**dataset.state_dict(), "num_samples": 5})


def test_collate_pads_on_the_right(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path))
    batch = collate([dataset[0], dataset[1]])
    assert batch["num_tokens"].tolist() == [40, 5]
    assert batch["hidden_2"].shape == (2, 40, 64) and batch["hidden_2"].dtype == torch.bfloat16
    assert torch.equal(batch["hidden_2"][1, :5], dataset[1]["hidden_2"]) and not batch["hidden_2"][1, 5:].any()
    assert batch["attention_mask"].sum(1).tolist() == [40, 5]
    assert batch["sample_id"] == ["id-0", "id-1"]


# ---- errors ----


def test_no_output(tmp_path: Path):
    with pytest.raises(OutputError, match=r"no _run/run\.json there"):
        HiddenStatesDataset(str(tmp_path))


def test_incomplete_needs_the_flag(made: MadeOutput, copy: Path):
    (copy / schema.MANIFEST).unlink()
    (copy / schema.marker_path(1)).unlink()
    with pytest.raises(OutputError, match=r"not complete.*incomplete=true"):
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


def test_importing_the_reader_loads_no_engine():
    heavy = ("ray", "sglang", "hydra", "omegaconf", "transformers")
    code = f"import sys, hs_ray.reader; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ---- S3 ----


@pytest.fixture
def bucket(made: MadeOutput, s3):
    """The output on a real S3 server."""
    storage = s3.storage()
    for file in made.path.rglob("*"):
        if file.is_file():
            storage.write(file.relative_to(made.path).as_posix(), file.read_bytes())
    return s3


@pytest.mark.integration
def test_s3_bit_exact_with_one_request_a_sample_for_its_states(made: MadeOutput, bucket):
    dataset = HiddenStatesDataset(bucket.url, storage_options=bucket.options)
    dataset[0]  # opens the first shard
    before = len(bucket.requests)
    dataset[1]
    assert len(bucket.requests) - before <= 3  # small columns, states
    assert_equals_truth(dataset, made)


@pytest.mark.integration
def test_s3_behind_forked_workers(made: MadeOutput, bucket):
    dataset = HiddenStatesDataset(bucket.url, columns=["hidden_5"], storage_options=bucket.options)
    dataset[0]  # connected before the fork
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert ids(loader) == [made.samples[i].sample_id for i in made.committed]
