"""Shards -> tensors, for a trainer. Imports neither ray nor sglang nor hydra.

    from torch.utils.data import DataLoader
    from hs_ray.reader import HiddenStatesDataset, collate

    dataset = HiddenStatesDataset("/nvme/hs", shuffle=True, batch_size=4)
    for batch in DataLoader(dataset, batch_size=4, num_workers=4, collate_fn=collate):
        batch["input_ids"], batch["loss_mask"], batch["hidden_2"], dataset.to_post_norm(batch["final_pre_norm"])

Shapes: B samples of a batch, S tokens of a sample (of the longest one, in a batch), H hidden_size.
"""

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hs_ray.errors import ConfigError, ShardError
from hs_ray.reader.batch import Sample, collate
from hs_ray.reader.norm import FinalNorm, load_final_norm
from hs_ray.reader.order import (
    SHARDS,
    Order,
    Place,
    check_consumed,
    check_ranks_of_a_node,
    differences,
    epoch_order,
    layout_digest,
    ranks,
    refuse_in_worker,
    share,
)
from hs_ray.reader.output import Output, ShardEntry, open_output
from hs_ray.reader.shard import ShardFile, chosen_columns
from hs_ray.schema import FINAL_NORM
from hs_ray.storage import Storage, open_storage

__all__ = [
    "FinalNorm",
    "HiddenStatesDataset",
    "Output",
    "ShardEntry",
    "ShardFile",
    "collate",
    "load_final_norm",
    "open_output",
]


class HiddenStatesDataset(IterableDataset[Sample]):
    """The samples of an output, local or `s3://`; `path` may be its storage, opened already.

    A sample is a dict: `sample_id`, `source`, `line`, `input_ids` (int64 [S]), `loss_mask` (uint8 [S], not shifted) and
    each chosen state column (bfloat16 [S, H]). Split samples are joined, `split_zstd` is undone.

    Iterating is sharded over ranks and DataLoader workers, shuffled if asked, and can be resumed in mid-epoch.
    `dataset[i]` and `len(dataset)` see this rank's share, in the order of the shards: that of the input, but a sample
    that failed once and was right the second time comes after the others of its unit. `map_style()` has every sample,
    for samplers. Behind a DataLoader worker the tensors of a sample or batch are views of one storage: clone() one of
    them before saving it alone.

    columns: state columns to read, None for all; what is not asked for is not read.
    shuffle: the order of an epoch is a function of seed and epoch alone: shards are shuffled, then the samples within
        each group of `window` shards. The same for any number of ranks and workers.
    batch_size: the DataLoader's, 1 if it makes no batches. Workers then take whole batches, so that the loader's order,
        and with it the place where `load_state_dict` takes up, does not depend on their number. None: `state_dict` is
        refused behind several workers.
    rank, world_size: None: those of torch.distributed, if it is initialised; beside accelerate they have to be given.
    even: drop the last samples (fewer than world_size) so that every rank has the same number.
    incomplete: read what is committed of an unfinished run, by one rank alone while it goes on: each lists for itself
        what there is, and one that is a moment later sees more. Their shares would not be of one set.

    Raises OutputError (no run there, or an unfinished one), ConfigError (no such column), ShardError (a damaged or
    foreign file, which it names), OSError (a disk or store that is unwell).
    """

    def __init__(
        self,
        path: str | Storage,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        *,
        seed: int = 0,
        window: int = 16,
        batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        even: bool = False,
        incomplete: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ):
        storage = path if isinstance(path, Storage) else open_storage(path, storage_options)
        self.output = open_output(storage, incomplete)
        self._path, self._storage = storage.root, self.output.storage
        if self.output.elsewhere:
            check_ranks_of_a_node(self._path, ranks(rank, world_size)[1], even)
        self.columns = chosen_columns(columns, self.output.spec.columns, self._path)
        if window < 1 or (batch_size is not None and batch_size < 1):
            raise ConfigError(f"window = {window}, batch_size = {batch_size}: at least 1")
        self.shuffle, self.seed, self.window, self.batch_size, self.even = shuffle, seed, window, batch_size, even
        self.rank, self.world_size = ranks(rank, world_size)
        self._first = np.cumsum([0] + [shard.samples for shard in self.output.shards])  # first sample of each shard
        self.num_samples = int(self._first[-1])  # over all ranks
        self._layout = layout_digest((shard.unit, shard.samples) for shard in self.output.shards)
        self.place = Place()
        self._taken = [0]  # samples that the latest pass of this process has given
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._pid = os.getpid()
        self._norm: FinalNorm | None = None

    # ---- order ----

    def __iter__(self) -> Iterator[Sample]:
        """A pass. It begins here and not with its first sample: a worker begins even one that is given up at once."""
        worker = get_worker_info()
        begin = self.place.begin(worker)
        order = np.arange(self.num_samples)
        if self.shuffle:
            order = epoch_order(self._first, self.seed, self.place.epoch, self.window)
        order = self._share(order[begin:])
        if worker is not None:  # every num_workers-th batch is this worker's
            order = order[(np.arange(len(order)) // (self.batch_size or 1)) % worker.num_workers == worker.id]
        self._taken = [0]
        return self._read_all(order, self._taken)

    def _read_all(self, order: np.ndarray, taken: list[int]) -> Iterator[Sample]:
        """taken: [samples so far], the pass's own, so that one that was given up no longer counts."""
        for number in order.tolist():
            sample = self.read(number)
            taken[0] += 1
            yield sample

    def _share(self, order: Order) -> Order:
        return share(order, self.rank, self.world_size, self.even)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which decides the order; a new one begins at its start. Reaches living workers, too."""
        if epoch != self.place.epoch:
            self.place.move(epoch, 0)
            self._taken = [0]

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the epoch stands: what JSON can hold. The ranks must be in step.

        A rank that has had its whole share says the end of the epoch, though another may have one sample to come: a
        state for all ranks is best rank 0's, whose share is the largest.

        consumed: samples that this rank has had since the pass began: batches taken * batch_size. Needed behind
            DataLoader workers, which read ahead; counted here otherwise.

        Raises ConfigError where that would not be exact: without `consumed` or `batch_size` behind workers, for
        batches of another size, and inside a worker.
        """
        refuse_in_worker("state_dict")
        left = self.num_samples - self.place.position
        mine = len(self._share(range(left)))
        if consumed is None and not self.place.workers:
            consumed = self._taken[0]
        had = check_consumed(consumed, mine, self.batch_size, self.place)
        over = had >= mine and (had > 0 or self.place.begun)  # a share of none, too, is had by a pass alone
        position = self.num_samples if over else self.place.position + had * self.world_size
        return {"epoch": self.place.epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken: the next pass is the rest of that epoch, each later one is whole.

        The rest is empty if the state was taken after the last sample. Numbers of ranks, of workers and `batch_size`
        may differ from those it was taken with. Raises ConfigError if it belongs to other data or another order.
        """
        refuse_in_worker("load_state_dict")
        wrong = differences(state, self._identity())
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        if not all(isinstance(value, int) and value >= 0 for value in (epoch, position)) or position > self.num_samples:
            wrong.append(f"epoch = {epoch!r}, position = {position!r} in the state")
        if wrong:
            raise ConfigError(
                f"the state does not fit {self._path}: {'; '.join(wrong)}; make the dataset as it was, or begin anew"
            )
        self.place.move(epoch, position)
        self._taken = [0]

    def _identity(self) -> dict[str, Any]:
        """All that the order of an epoch depends on."""
        return {
            "fingerprint": self.output.fingerprint,
            "num_samples": self.num_samples,
            SHARDS: self._layout,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "window": self.window,
        }

    # ---- samples ----

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return len(self._share(range(self.num_samples)))

    def __getitem__(self, index: int) -> Sample:
        return self.read(self._share(range(self.num_samples))[index])  # IndexError past the end, as a sequence does

    def map_style(self) -> "MapStyle":
        """All samples, whatever the rank, for a DataLoader whose sampler shares them out (DistributedSampler)."""
        return MapStyle(self)

    def read(self, number: int, columns: Sequence[str] | None = None) -> Sample:
        """Sample `number` of the whole output, whatever the rank, in the order of the shards.

        columns: state columns to read; None for the dataset's.
        """
        shard = self._shard_number(number)
        file = self._open(shard)
        rows = file.sample_rows(self.output.shards[shard].samples)[number - int(self._first[shard])]
        # What a worker hands over itself lies in shared memory; what is to be collated there need not.
        shared = get_worker_info() is not None and self.batch_size in (None, 1)
        chosen = self.columns if columns is None else chosen_columns(columns, self.output.spec.columns, self._path)
        return file.sample(rows, chosen, shared)

    def shard_of(self, number: int) -> ShardEntry:
        """The shard that holds a sample of the whole output."""
        return self.output.shards[self._shard_number(number)]

    def _shard_number(self, number: int) -> int:
        if not 0 <= number < self.num_samples:
            raise IndexError(f"sample {number} of {self.num_samples}")
        return int(np.searchsorted(self._first, number, side="right")) - 1

    def to_post_norm(self, x: torch.Tensor) -> torch.Tensor:
        """`final_pre_norm` [..., H] -> what the model's lm_head takes, `final_post_norm` [..., H]."""
        if self._norm is None:
            norm, hidden = load_final_norm(self._storage), self.output.spec.hidden_size
            if tuple(norm.weight.shape) != (hidden,):  # one of [1] would fit any width
                raise ShardError(
                    f"{self._path}/{FINAL_NORM}: its weight is {list(norm.weight.shape)}, hidden_size {hidden}"
                )
            self._norm = norm
        return self._norm(x)

    def _open(self, shard: int) -> ShardFile:
        if self._pid != os.getpid():  # forked or copied: connections and descriptors are the parent's
            self._files, self._pid = OrderedDict(), os.getpid()
            # A copy and not opened anew: that the store has answered goes along, and with it the patience for it.
            self._storage = copy.deepcopy(self.output.storage)
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        while len(self._files) >= 2 * self.window:
            self._files.popitem(last=False)[1].close()
        file = ShardFile(self._storage, self.output.shards[shard].path)
        try:
            self._check_footer(file, self.output.shards[shard].unit)
        except ShardError:
            file.close()
            raise
        self._files[shard] = file
        return file

    def _check_footer(self, file: ShardFile, unit: int) -> None:
        """Raises ShardError for a shard of another run or unit, or one whose footer is damaged."""
        output, spec = self.output, self.output.spec
        if (found := file.metadata.get("unit", unit)) != unit:
            raise ShardError(f"{file.name}: holds unit {found} under the name of unit {unit}'s shard")
        expected = {
            "fingerprint": output.fingerprint,
            "columns": list(spec.columns),
            "hidden_size": spec.hidden_size,
            "compression": output.compression,
        }
        for name, value in expected.items():
            if (found := file.metadata[name]) != value:
                raise ShardError(
                    f"{file.name}: made by another configuration ({name} {found!r}, the run's is {value!r})"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict(), "_pid": -1}  # the copy opens its own

    def __copy__(self) -> "HiddenStatesDataset":
        return copy.deepcopy(self)  # or both would stand in one place


class MapStyle(Dataset[Sample]):
    """Every sample of an output by number, in the order of the shards. The rank is the sampler's affair."""

    def __init__(self, dataset: HiddenStatesDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return self.dataset.num_samples

    def __getitem__(self, index: int) -> Sample:
        return self.dataset.read(range(len(self))[index])  # IndexError past the end
