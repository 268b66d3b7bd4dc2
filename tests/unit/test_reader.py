"""hs_ray.reader on small outputs: values, order, sharding. Resuming and errors: test_reader_{resume,damage}.py."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from make_output import MadeOutput, make_output, rewrite
from torch.utils.data import DataLoader, DistributedSampler

from hs_ray import schema
from hs_ray.errors import ConfigError
from hs_ray.reader import HiddenStatesDataset, collate


@pytest.fixture
def made(both_output: MadeOutput) -> MadeOutput:
    """Shared: what damages it takes `copy`."""
    return both_output


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
    assert dataset[3]["sample_id"] == made.samples[3].sample_id
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_sample_that_was_tried_again_comes_last_of_its_unit(copy: Path, made: MadeOutput):
    rewrite(dataclasses.replace(made, path=copy), 0, lambda rows: [*rows[1:], rows[0]])
    order = [1, 2, 3, 0, *made.committed[4:]]
    for number, (i, sample) in enumerate(zip(order, HiddenStatesDataset(str(copy)), strict=True)):
        assert (number, sample["sample_id"], sample["line"]) == (number, f"id-{i}", made.samples[i].line)
        assert np.array_equal(sample["input_ids"], made.samples[i].input_ids)
        for name in made.spec.columns:
            assert np.array_equal(bits(sample[name]), made.states[i][name])


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
    one = HiddenStatesDataset(str(made.path), columns="hidden_4")
    assert (
        one.columns == HiddenStatesDataset(str(made.path), columns=["input_ids", "hidden_4"]).columns == ("hidden_4",)
    )
    assert one.read(0, ["loss_mask", "hidden_2"]).keys() - sample.keys() == {"hidden_2"}


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


def test_beside_accelerate_the_rank_has_to_be_given(made: MadeOutput, monkeypatch: pytest.MonkeyPatch):
    """It would share the rank's share once more."""
    from accelerate.state import PartialState

    for processes, state in ((1, {}), (1, {"num_processes": 1}), (2, {"num_processes": 2})):
        monkeypatch.setattr(PartialState, "_shared_state", state)
        assert not state or PartialState().num_processes == processes  # where accelerate itself keeps it
        if processes == 1:
            assert len(HiddenStatesDataset(str(made.path))) == len(made.committed)
            continue
        with pytest.raises(ConfigError) as caught:
            HiddenStatesDataset(str(made.path))
        assert str(caught.value) == (
            "rank = None, world_size = None: accelerate runs 2 processes, and what it prepares it shares over them "
            "itself; give rank=0, world_size=1 where it prepares the loader (Trainer does; with map_style() too), this "
            "process's own rank and world_size where it does not"
        )
        assert len(HiddenStatesDataset(str(made.path), rank=0, world_size=1).map_style()) == len(made.committed)
        assert len(HiddenStatesDataset(str(made.path), rank=1, world_size=2)) == len(made.committed) // 2


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


@pytest.mark.parametrize("world", [1, 2])
def test_map_style_leaves_the_sharing_to_the_sampler(made: MadeOutput, world: int):
    got = []
    for rank in range(world):
        samples = HiddenStatesDataset(str(made.path), columns=[], rank=rank, world_size=world).map_style()
        sampler = DistributedSampler(samples, num_replicas=world, rank=rank, shuffle=False)
        got += ids(DataLoader(samples, batch_size=None, sampler=sampler))
    assert sorted(set(got)) == sorted(made.samples[i].sample_id for i in made.committed)
    assert samples[-1]["sample_id"] == samples[10]["sample_id"] == "id-11"
    with pytest.raises(IndexError):
        samples[11]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_what_workers_hand_over_is_one_storage_and_bit_exact(made: MadeOutput, batch_size: int | None):
    dataset = HiddenStatesDataset(str(made.path), batch_size=batch_size)
    together = collate if batch_size else None
    here, there = (
        list(DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=together)) for workers in (0, 2)
    )
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        tensors = [name for name in one if isinstance(one[name], torch.Tensor)]
        for name in one:
            same = torch.equal(one[name], other[name]) if name in tensors else one[name] == other[name]
            assert same, name
        assert len({other[name].untyped_storage().data_ptr() for name in tensors}) == 1
        assert len({one[name].untyped_storage().data_ptr() for name in tensors}) == len(tensors)


def test_collate_pads_on_the_right(made: MadeOutput):
    dataset = HiddenStatesDataset(str(made.path))
    batch = collate([dataset[0], dataset[1]])
    assert batch["num_tokens"].tolist() == [40, 5]
    assert batch["hidden_2"].shape == (2, 40, 64) and batch["hidden_2"].dtype == torch.bfloat16
    assert torch.equal(batch["hidden_2"][1, :5], dataset[1]["hidden_2"]) and not batch["hidden_2"][1, 5:].any()
    assert batch["attention_mask"].sum(1).tolist() == [40, 5]
    assert batch["sample_id"] == ["id-0", "id-1"]


def test_importing_the_reader_loads_no_engine():
    heavy = ("ray", "sglang", "hydra", "omegaconf", "transformers")
    code = f"import sys, hs_ray.reader; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


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
