"""Shards -> tensors, for a trainer. Imports neither ray nor sglang nor hydra.

    from torch.utils.data import DataLoader
    from hs_ray.reader import HiddenStatesDataset, collate

    dataset = HiddenStatesDataset("/nvme/hs", shuffle=True, batch_size=4)
    for batch in DataLoader(dataset, batch_size=4, num_workers=4, collate_fn=collate):
        batch["input_ids"], batch["loss_mask"], batch["hidden_2"], dataset.to_post_norm(batch["final_pre_norm"])

Shapes: B samples of a batch, S tokens of a sample (of the longest one, in a batch), H hidden_size.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hs_ray.errors import ConfigError, ShardError
from hs_ray.reader.norm import FinalNorm, load_final_norm
from hs_ray.reader.output import Output, ShardEntry, find_shards, open_output
from hs_ray.reader.shard import ShardFile
from hs_ray.storage import open_storage

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

Sample = dict[str, Any]


class HiddenStatesDataset(IterableDataset[Sample]):
    """The samples of an output, local or `s3://`.

    A sample is a dict: `sample_id`, `source`, `line`, `input_ids` (int64 [S]), `loss_mask` (uint8 [S], not shifted) and
    each chosen state column (bfloat16 [S, H]). Split samples are joined, `split_zstd` is undone.

    Iterating is sharded over ranks and DataLoader workers, shuffled if asked, and can be resumed in mid-epoch.
    `dataset[i]` and `len(dataset)` see this rank's share in the order of the input; `map_style()` is that alone.

    columns: state columns to read, None for all; what is not asked for is not read.
    shuffle: the order of an epoch is a function of seed and epoch alone: shards are shuffled, then the samples within
        each group of `window` shards. The same for any number of ranks and workers.
    batch_size: the DataLoader's. Workers then take whole batches, so that the loader's order, and with it the place
        where `load_state_dict` takes up, does not depend on their number.
    rank, world_size: None: those of torch.distributed, if it is initialised.
    even: drop the last samples (fewer than world_size) so that every rank has the same number.
    incomplete: read what is committed of an unfinished run.

    Raises OutputError (no run there, or an unfinished one), ConfigError (no such column), ShardError (a damaged or
    foreign file, which it names).
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        *,
        seed: int = 0,
        window: int = 16,
        batch_size: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        even: bool = False,
        incomplete: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ):
        self._path, self._options = path, dict(storage_options or {})
        self.output = open_output(open_storage(path, self._options), incomplete)
        self._storage = self.output.storage
        if self.output.elsewhere:
            _check_ranks_of_a_node(path, _ranks(rank, world_size)[1], even)
        known = self.output.spec.columns
        self.columns = tuple(known if columns is None else columns)
        unknown = [name for name in self.columns if name not in known]
        if unknown:
            raise ConfigError(f"columns = {list(self.columns)}: {unknown} are not in {path}; it has {', '.join(known)}")
        self.shuffle, self.seed, self.window, self.batch_size, self.even = (
            shuffle,
            seed,
            max(1, window),
            max(1, batch_size),
            even,
        )
        self.rank, self.world_size = _ranks(rank, world_size)
        self._first = np.cumsum([0] + [shard.samples for shard in self.output.shards])  # first sample of each shard
        self.num_samples = int(self._first[-1])  # over all ranks
        # [epoch, samples of it that all ranks together have had]; shared, so that living workers see set_epoch().
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._taken = 0  # by this process, since then
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._pid = os.getpid()
        self._norm: FinalNorm | None = None

    # ---- order ----

    def _epoch_order(self) -> np.ndarray:
        """Sample numbers of the whole epoch, over all ranks."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        random = np.random.default_rng([self.seed, int(self._start[0])])
        shards = random.permutation(len(self.output.shards))
        parts = []
        for at in range(0, len(shards), self.window):
            group = [np.arange(self._first[i], self._first[i + 1]) for i in shards[at : at + self.window]]
            parts.append(random.permutation(np.concatenate(group)))
        return np.concatenate(parts) if parts else np.arange(0)

    def _share(self, order: np.ndarray) -> np.ndarray:
        """This rank's share of an order, dealt out one by one."""
        if self.even:
            order = order[: len(order) - len(order) % self.world_size]
        return order[self.rank :: self.world_size]

    def __iter__(self) -> Iterator[Sample]:
        order = self._share(self._epoch_order()[int(self._start[1]) :])
        worker = get_worker_info()
        if worker is not None:  # every num_workers-th batch is this worker's
            order = order[(np.arange(len(order)) // self.batch_size) % worker.num_workers == worker.id]
        self._taken = 0
        for number in order.tolist():
            sample = self.read(number)
            self._taken += 1
            yield sample
        if worker is None:
            self._start[1], self._taken = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which decides the order; a new one begins at its start. Reaches living workers, too."""
        if epoch != int(self._start[0]):
            self._start[0], self._start[1], self._taken = epoch, 0, 0

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """Where the epoch stands. The ranks must be in step; their number may be another one at `load_state_dict`.

        consumed: samples that this rank has had since the iteration began. Needed behind a DataLoader with workers
            (batches taken * batch_size), counted here otherwise.
        """
        taken = self._taken if consumed is None else consumed
        position = min(int(self._start[1]) + taken * self.world_size, self.num_samples)
        return {"epoch": int(self._start[0]), "position": position, "seed": self.seed, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was taken. Raises ConfigError if it belongs to other data."""
        if state["num_samples"] != self.num_samples:
            raise ConfigError(
                f"state of a dataset of {state['num_samples']} samples; {self._path} has {self.num_samples}"
            )
        self.seed = state["seed"]
        self._start[0], self._start[1], self._taken = state["epoch"], state["position"], 0

    # ---- samples ----

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return len(self._share(np.arange(self.num_samples)))

    def __getitem__(self, index: int) -> Sample:
        share = self._share(np.arange(self.num_samples))
        return self.read(int(share[index]))  # IndexError past the end, as a sequence does

    def map_style(self) -> "MapStyle":
        """The same samples for a DataLoader with a sampler of its own (DistributedSampler, for example)."""
        return MapStyle(self)

    def read(self, number: int, columns: Sequence[str] | None = None) -> Sample:
        """Sample `number` of the whole output, whatever the rank; 0 is the first of the input.

        columns: state columns to read; None for the dataset's.
        """
        shard = self._shard_number(number)
        file = self._open(shard)
        rows = file.sample_rows(self.output.shards[shard].samples)[number - int(self._first[shard])]
        return file.sample(rows, self.columns if columns is None else columns)

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
            self._norm = load_final_norm(self._storage)
        return self._norm(x)

    def _open(self, shard: int) -> ShardFile:
        if self._pid != os.getpid():  # forked or copied: connections and descriptors are the parent's
            self._files, self._pid = OrderedDict(), os.getpid()
            self._storage = find_shards(open_storage(self._path, self._options), self.output.run)
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        while len(self._files) >= 2 * self.window:
            self._files.popitem(last=False)[1].close()
        file = ShardFile(self._storage, self.output.shards[shard].path)
        found = file.metadata["fingerprint"]
        if found != self.output.fingerprint:
            raise ShardError(
                f"{file.name}: made by another configuration ({found}, the run's is {self.output.fingerprint})"
            )
        self._files[shard] = file
        return file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict(), "_pid": -1}  # the copy opens its own


class MapStyle(Dataset[Sample]):
    """`len()` and `[i]` of a HiddenStatesDataset, without its iteration."""

    def __init__(self, dataset: HiddenStatesDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index]


LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def _check_ranks_of_a_node(path: str, world_size: int, even: bool) -> None:
    """Ranks of several nodes cannot share out what is on one. Raises ConfigError."""
    here = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), None)
    if world_size > 1 and str(world_size) != here:
        raise ConfigError(
            f"{path}: world_size = {world_size}, and its shards are on each node's own disk; give rank and world_size "
            f"of this node's processes (LOCAL_RANK, LOCAL_WORLD_SIZE, which is {here or 'not set'})"
        )
    if even:
        raise ConfigError(
            f"{path}: even = True, and its shards are on each node's own disk: nodes have different numbers of "
            "samples; copy the shards into one place, or stop at the shortest"
        )


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(f"rank = {rank}, world_size = {world_size}: give both, with 0 <= rank < world_size")
    return rank, world_size


def collate(samples: Sequence[Sample]) -> Sample:
    """Samples -> one batch, padded with zeros on the right to its longest sample.

    input_ids int64 [B, S], loss_mask uint8 [B, S], attention_mask bool [B, S], num_tokens int64 [B], states bfloat16
    [B, S, H]; `sample_id`, `source` and `line` are lists.
    """
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    longest = int(lengths.max())
    batch: Sample = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if not isinstance(first, torch.Tensor):
            batch[name] = values
            continue
        padded = first.new_zeros((len(samples), longest, *first.shape[1:]))
        for row, value in zip(padded, values, strict=True):
            row[: len(value)] = value
        batch[name] = padded
    batch["attention_mask"] = torch.arange(longest)[None, :] < lengths[:, None]
    batch["num_tokens"] = lengths
    return batch
