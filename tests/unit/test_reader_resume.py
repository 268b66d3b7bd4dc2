"""Where a pass of hs_ray.reader stands, is taken up again, and what never silently repeats or loses a sample."""

import copy
import json
import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_output import MadeOutput, make_output
from torch.utils.data import DataLoader, get_worker_info

from hs_ray.errors import ConfigError
from hs_ray.reader import HiddenStatesDataset, collate
from hs_ray.reader.order import Place


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeOutput:
    return make_output(tmp_path_factory.mktemp("resume") / "out")


def ids(samples) -> list[str]:
    return [sample["sample_id"] for sample in samples]


def dataset_of(made: MadeOutput, **options: Any) -> HiddenStatesDataset:
    return HiddenStatesDataset(str(made.path), **({"columns": [], "shuffle": True, "seed": 3} | options))


def load(dataset: HiddenStatesDataset, workers: int, batch_size: int = 2, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=collate, **options)


def batch_ids(loader: DataLoader) -> list[str]:
    return [name for batch in loader for name in batch["sample_id"]]


def test_resume_in_mid_epoch(made: MadeOutput):
    dataset = dataset_of(made)
    expected = ids(dataset)
    iterator = iter(dataset)
    head = [next(iterator)["sample_id"] for _ in range(4)]
    state = dataset.state_dict()
    again = dataset_of(made)
    again.load_state_dict(state)
    assert head + ids(again) == expected
    assert ids(again) == expected  # the next pass is a whole one
    halves = [dataset_of(made, rank=r, world_size=2) for r in range(2)]
    for half in halves:
        half.load_state_dict(state)  # taken by one rank, continued by two
    assert sorted(sum((ids(half) for half in halves), head)) == sorted(expected)


def test_resume_behind_workers(made: MadeOutput):
    dataset = dataset_of(made, batch_size=2)
    expected = ids(dataset)
    iterator = iter(DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=collate))
    head = [name for _ in range(3) for name in next(iterator)["sample_id"]]
    again = dataset_of(made, batch_size=2)
    again.load_state_dict(dataset.state_dict(consumed=6))
    assert head + ids(again) == expected


@pytest.mark.parametrize(
    ("workers", "then", "persistent"),
    [(0, 0, False), (1, 1, False), (2, 2, False), (1, 2, False), (2, 1, False), (0, 2, False), (2, 0, False)]
    + [(1, 1, True), (2, 2, True)],
)
def test_only_the_first_pass_after_a_resume_begins_in_the_middle(
    made: MadeOutput, workers: int, then: int, persistent: bool
):
    dataset = dataset_of(made, batch_size=2)
    whole = ids(dataset)
    dataset.load_state_dict({**dataset.state_dict(), "position": 4})
    loader = load(dataset, workers, persistent_workers=persistent)
    assert batch_ids(loader) == whole[4:]
    for _ in range(2):
        assert batch_ids(loader if workers == then else load(dataset, then)) == whole
    dataset.load_state_dict({**dataset.state_dict(0), "position": 6})  # seen by living workers, too
    assert batch_ids(loader) == whole[6:]


def test_the_first_pass_is_told_from_the_next_with_the_same_seed(made: MadeOutput):
    """A generator that is seeded again gives the workers of each pass the same seed."""
    dataset = dataset_of(made, batch_size=2)
    whole = ids(dataset)
    dataset.load_state_dict({**dataset.state_dict(), "position": 4})
    passes = [batch_ids(load(dataset, 2, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    assert passes == [whole[4:], whole]


def test_each_worker_tells_the_first_pass_by_itself():
    """In whichever order they begin, and though a worker of the first pass was killed before it began."""

    def begins(number: int, workers: int, seed: int) -> int:
        return place.begin(SimpleNamespace(id=number, num_workers=workers, seed=seed + number))

    place = Place()
    place.move(0, 4)
    assert begins(0, 1, seed=7) == 4
    assert begins(1, 2, seed=7) == begins(0, 2, seed=7) == place.position == 0
    place.move(0, 4)
    assert begins(1, 2, seed=7) == 4
    assert begins(0, 2, seed=8) == begins(1, 2, seed=8) == place.position == 0


def test_a_pass_that_was_given_up_at_once_was_the_first(made: MadeOutput):
    for workers in (0, 2):
        dataset = dataset_of(made, batch_size=2)
        whole = ids(dataset)
        dataset.load_state_dict({**dataset.state_dict(), "position": 4})
        next(iter(load(dataset, workers)))
        assert batch_ids(load(dataset, workers)) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_state_after_the_last_sample_is_the_end_of_the_epoch(made: MadeOutput, workers: int):
    dataset = dataset_of(made, batch_size=2)
    whole = batch_ids(load(dataset, workers))
    state = json.loads(json.dumps(dataset.state_dict(consumed=12)))  # 6 batches, the last one short
    assert (state["epoch"], state["position"]) == (0, 11)
    again = dataset_of(made, batch_size=2)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert batch_ids(load(again, workers)) == []
    again.set_epoch(1)
    assert sorted(batch_ids(load(again, workers))) == sorted(whole)


def test_epochs_go_on_where_they_were(made: MadeOutput):
    """The loop of docs/trainers.md, cut off after any number of batches."""

    def train(dataset: HiddenStatesDataset, batches: int, state: dict[str, Any] | None) -> tuple[list[str], dict]:
        got: list[str] = []
        if state:
            dataset.load_state_dict(state)
        for epoch in range(state["epoch"] if state else 0, 3):
            dataset.set_epoch(epoch)
            for taken, batch in enumerate(load(dataset, 2), 1):
                got += batch["sample_id"]
                batches -= 1
                if not batches:
                    return got, dataset.state_dict(consumed=taken * 2)
        return got, {}

    whole, _ = train(dataset_of(made, batch_size=2), -1, None)
    assert len(whole) == 33
    for cut in (1, 5, 6, 7, 12, 17):
        head, state = train(dataset_of(made, batch_size=2), cut, None)
        tail, _ = train(dataset_of(made, batch_size=2), -1, state)
        assert head + tail == whole, cut


@pytest.mark.parametrize("even", [False, True])
def test_every_ranks_own_state_resumes_it(made: MadeOutput, even: bool):
    for taken in range(7):
        head, tail = [], []
        for rank in range(2):
            one = dataset_of(made, rank=rank, world_size=2, even=even)
            head += ids(islice(one, taken))
            again = dataset_of(made, rank=rank, world_size=2, even=even)
            again.load_state_dict(one.state_dict())
            tail += ids(again)
        assert len(head + tail) == len(set(head + tail)) == (10 if even else 11)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_any_ranks_state_of_the_epochs_end_is_the_end_for_all(made: MadeOutput, workers: int, even: bool):
    """11 samples on 2 and 4 ranks: the last of them have had one less than the first."""
    for world_size in (2, 4):
        ranks = [dataset_of(made, rank=r, world_size=world_size, even=even) for r in range(world_size)]
        for one in ranks:
            state = one.state_dict(consumed=len(batch_ids(load(one, workers, batch_size=1))))
            assert state["position"] == 11
            for again in (dataset_of(made, rank=r, world_size=world_size, even=even) for r in range(world_size)):
                again.load_state_dict(state)
                assert ids(again) == []
                again.set_epoch(1)
                assert len(ids(again)) == len(again)


def test_a_share_of_no_sample_ends_with_its_pass(made: MadeOutput):
    """One sample is left, which is rank 0's."""
    state = dataset_of(made).state_dict() | {"position": 10}
    last = dataset_of(made, rank=1, world_size=2)
    last.load_state_dict(state)
    assert last.state_dict() == state  # not begun: the sample is still to come
    assert ids(last) == []
    assert last.state_dict()["position"] == 11


# ---- what is not exact is refused ----


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_behind_workers_the_samples_must_be_counted(made: MadeOutput):
    dataset = dataset_of(made, batch_size=2)
    iterator = iter(load(dataset, 2))
    next(iterator)
    assert "consumed = None: DataLoader workers read ahead" in refused(dataset.state_dict)
    assert "multiple of batch_size = 2" in refused(lambda: dataset.state_dict(consumed=3))
    assert "consumed = 13: this rank has 11 samples in this pass" in refused(lambda: dataset.state_dict(consumed=13))
    assert "consumed = -2" in refused(lambda: dataset.state_dict(consumed=-2))
    assert dataset.state_dict(consumed=2)["position"] == 2


@pytest.mark.parametrize(("given", "loaders"), [(None, 4), (1, 4), (2, 4), (4, 2)])
def test_behind_workers_the_batch_size_must_be_the_loaders(made: MadeOutput, given: int | None, loaders: int):
    dataset = dataset_of(made, batch_size=given)
    next(iter(load(dataset, 2, batch_size=loaders)))
    told = refused(lambda: dataset.state_dict(consumed=4))
    assert f"batch_size = {given}: " in told and f"HiddenStatesDataset(batch_size={loaders})" in told
    alone = dataset_of(made, batch_size=given)  # with one worker the order is that of one process
    whole = ids(alone)
    head = next(iter(load(alone, 1, batch_size=loaders)))["sample_id"]
    again = dataset_of(made)
    again.load_state_dict(alone.state_dict(consumed=loaders))
    assert head + ids(again) == whole


def call_in_worker(method: str) -> Callable[[int], None]:
    def call(_: int) -> None:
        dataset = get_worker_info().dataset
        dataset.state_dict() if method == "state_dict" else dataset.load_state_dict({})

    return call


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_a_worker_has_no_state(made: MadeOutput, method: str):
    loader = load(dataset_of(made, batch_size=2), 1, worker_init_fn=call_in_worker(method))
    assert f"{method}() in a DataLoader worker" in refused(lambda: list(loader))


@pytest.mark.parametrize(
    ("name", "value"),
    [("fingerprint", "e" * 64), ("num_samples", 5), ("shuffle", False), ("seed", 4), ("window", 1), ("epoch", -1)]
    + [("position", 12), ("position", None)],
)
def test_a_state_of_other_data_or_another_order_is_refused(made: MadeOutput, name: str, value: Any):
    dataset = dataset_of(made)
    state = dataset.state_dict()
    assert f"{name} = {value!r}" in refused(lambda: dataset.load_state_dict(state | {name: value}))
    del state[name]
    assert f"{name} = " in refused(lambda: dataset.load_state_dict(state))
    assert len(ids(dataset)) == 11  # as if nothing had been


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_of_other_shards_is_refused(made: MadeOutput, tmp_path: Path, shuffle: bool):
    """The same samples, fingerprint and options: it is by shards that an epoch is shuffled."""
    others = dataset_of(make_output(tmp_path / "out", per_unit=6), shuffle=shuffle)
    state = dataset_of(made, shuffle=shuffle).state_dict()
    told = refused(lambda: others.load_state_dict(state))
    assert f"shards = {state['shards']!r} in the state" in told and "fingerprint" not in told
    del state["shards"]  # as earlier releases left it
    others.load_state_dict(state)


# ---- copies ----


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_stands_for_itself_and_reaches_its_living_workers(made: MadeOutput, duplicate: Callable[[Any], Any]):
    original = dataset_of(made, batch_size=2)
    first = ids(original)
    other = duplicate(original)
    loader = load(other, 1, persistent_workers=True)
    assert batch_ids(loader) == first
    other.set_epoch(1)
    assert original.place.epoch == 0
    assert batch_ids(loader) == ids(other) != first


def test_spawned_workers_see_the_next_epoch_and_the_position(made: MadeOutput):
    dataset = dataset_of(made, batch_size=2)
    whole = ids(dataset)
    loader = load(dataset, 1, persistent_workers=True, multiprocessing_context="spawn")
    dataset.load_state_dict({**dataset.state_dict(), "position": 4})
    assert batch_ids(loader) == whole[4:]
    dataset.set_epoch(1)
    assert batch_ids(loader) == ids(dataset) != whole
