"""Shards -> the files of a trainer.

    export("/nvme/hs", "specforge", "/nvme/spec")

One module a trainer; the unit of work is a shard, in processes of their own. A file is whole or not there, so an export
that was cut off goes on where it was. Nothing is shifted: every trainer shifts for itself.
"""

import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hs_ray.errors import ConfigError, OutputError, RunError
from hs_ray.export.common import TMP, Choice, Exporter, Totals, write_whole
from hs_ray.export.modelopt import ModelOptExporter
from hs_ray.export.note import NOTE, check_same, make_note, write_note
from hs_ray.export.specforge import SpecForgeExporter
from hs_ray.export.speculators import SpeculatorsExporter
from hs_ray.export.speculators_v1 import SpeculatorsV1Exporter
from hs_ray.reader import HiddenStatesDataset, Output
from hs_ray.reader.output import check_complete
from hs_ray.reader.run import load_json
from hs_ray.schema import MANIFEST, RUN_JSON, SHARDS
from hs_ray.storage import open_storage
from hs_ray.verify.run import read_run

EXPORTERS: dict[str, type[Exporter]] = {
    kind.name: kind for kind in (SpeculatorsExporter, SpecForgeExporter, ModelOptExporter, SpeculatorsV1Exporter)
}
Log = Callable[[str], None]


@dataclass(frozen=True)
class UnitResult:
    """samples written now, and those that were there; lengths and token counts of all of them."""

    index: int
    written: int
    bytes: int
    lengths: list[int]
    token_counts: np.ndarray


@dataclass(frozen=True)
class _Task:
    """One shard. `dataset` is one for all tasks: to open an output takes a listing, or the reading of all markers."""

    dataset: HiddenStatesDataset  # not opened anew by a worker: it has the patience for a store that has answered
    folder: str
    exporter: Exporter
    index: int  # of the shard
    first: int  # number of its first sample


def export(
    path: str,
    to: str,
    target: str,
    *,
    workers: int = 2,
    incomplete: bool = False,
    draft_vocab_size: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    log: Log = print,
) -> dict[str, Any]:
    """Write the output at `path` for the trainer `to` into the folder `target`; returns the note written beside it.

    Raises ConfigError if the trainer cannot use this output, OutputError if it does not fit or `target` holds another
    export, ShardError for states that no trainer should see (which trainers do not check), RunError where a worker was
    killed.
    """
    storage = open_storage(path, storage_options)
    read_run(storage)
    if not incomplete:  # also the reader's check, which would name its own keyword
        check_complete(storage, load_json(storage, MANIFEST), "export.incomplete=true")
    # A window of 1: shards are read one after the other, and an open one has its whole footer in memory.
    dataset = HiddenStatesDataset(storage, window=1, incomplete=incomplete, rank=0, world_size=1)
    output = dataset.output
    if output.elsewhere:
        raise OutputError(
            f"output.path = {path}: {sum(output.elsewhere.values()):,} shards are on other nodes' own disks "
            f"({', '.join(sorted(output.elsewhere))}); copy all shards into {output.storage.root}/shards/ first"
        )
    exporter = EXPORTERS[to](Choice.of(output), output)
    if draft_vocab_size is not None and not 1 <= draft_vocab_size <= exporter.vocab_size:
        raise ConfigError(
            f"export.draft_vocab_size = {draft_vocab_size}: from 1 to the model's vocabulary, {exporter.vocab_size}"
        )
    note = make_note(exporter, output)
    folder = _prepare(Path(target), exporter, output, note, draft_vocab_size, log)
    firsts = np.cumsum([0] + [shard.samples for shard in output.shards]).tolist()
    tasks = [_Task(dataset, str(folder), exporter, i, firsts[i]) for i in range(len(output.shards))]
    totals = _run(tasks, workers, output, exporter, log)
    if draft_vocab_size is not None:
        _check_learnt(totals, draft_vocab_size)
    note |= {"draft_vocab_size": draft_vocab_size}
    write_note(folder, note)  # before the mapping: one that is there is noted
    exporter.finish(folder, totals, draft_vocab_size)
    note |= {"complete": True}
    write_note(folder, note)
    shutil.rmtree(folder / TMP, ignore_errors=True)
    return note


def _check_learnt(totals: Totals, draft_vocab_size: int) -> None:
    """A draft vocabulary of tokens that are never learnt would be the first ids, silently."""
    if not totals.token_counts.any():
        raise ConfigError(
            f"export.draft_vocab_size = {draft_vocab_size}: takes the most frequent learnt tokens, and no loss_mask "
            f"has a 1; export without it, or extract from samples with answers"
        )


def _prepare(
    target: Path, exporter: Exporter, output: Output, note: dict[str, Any], draft_vocab_size: int | None, log: Log
) -> Path:
    """Say the size, make sure that it fits and that the folder is ours."""
    _check_outside(target, output)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"export.path = {target}: cannot be made ({error.strerror})") from None
    there, mapping = 0, None
    if (target / NOTE).exists():
        mapping = check_same(target, note, draft_vocab_size)
        there = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    elif any(entry.name != TMP for entry in target.iterdir()):  # a start that was cut off leaves that alone
        raise OutputError(f"export.path = {target}: is not empty and not an export of ours; choose another folder")
    shutil.rmtree(target / TMP, ignore_errors=True)
    free, size = shutil.disk_usage(target).free, exporter.sample_bytes(output.tokens) + 2048 * output.samples
    what = f"{output.samples:,} samples, {output.tokens:,} tokens"
    log(f"{exporter.name}: {what}, {size / 1e9:,.2f} GB ({free / 1e9:,.1f} GB free)")
    for name, value in exporter.layers_note().items():
        log(f"  {name}: {value}")
    if size - there > free:
        raise OutputError(
            f"export.path = {target}: {(size - there) / 1e9:,.2f} GB are needed, {free / 1e9:,.2f} GB are free"
        )
    write_note(target, note | {"draft_vocab_size": mapping})
    return target.resolve()


def _check_outside(target: Path, output: Output) -> None:
    """Not inside the output, whose readers would take the files for shards."""
    for path in (RUN_JSON, f"{SHARDS}/x"):  # shards may be on a disk of their own
        local = output.storage.local_path(path)
        root = Path(local).resolve().parents[1] if local else None
        if root and target.resolve().is_relative_to(root):
            raise OutputError(f"export.path = {target}: is inside the output, {root}; choose a folder elsewhere")


def _run(tasks: list[_Task], workers: int, output: Output, exporter: Exporter, log: Log) -> Totals:
    totals = Totals(token_counts=np.zeros(exporter.vocab_size, np.int64))
    lengths: dict[int, list[int]] = {}
    started = said = time.monotonic()
    written = size = 0
    for done, result in enumerate(_results(tasks, workers), 1):
        lengths[result.index] = result.lengths
        totals.token_counts += result.token_counts
        written, size = written + result.written, size + result.bytes
        if time.monotonic() - said > 5 or done == len(tasks):
            said = time.monotonic()
            rate = size / max(said - started, 1e-9) / 1e9
            log(f"{done}/{len(tasks)} shards, {written:,} samples written, {size / 1e9:,.2f} GB, {rate:.2f} GB/s")
    totals.lengths = [length for index in sorted(lengths) for length in lengths[index]]
    return totals


def _results(tasks: list[_Task], workers: int) -> Iterator[UnitResult]:
    if workers <= 1 or len(tasks) <= 1:
        yield from map(export_unit, tasks)
        return
    # Not forked: torch's threads and connections to S3 do not survive a fork. The tasks are handed over once, since all
    # of them have the one dataset, which knows every shard.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _begin_worker, (tasks,)) as pool:
        try:
            futures = [pool.submit(_export_in_worker, number) for number in range(len(tasks))]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise RunError(
                f"export.workers = {workers}: a worker was killed, most likely for want of memory; fewer, and run the "
                "same command again"
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_tasks: list[_Task] = []  # of a worker process


def _begin_worker(tasks: list[_Task]) -> None:
    torch.set_num_threads(1)
    _tasks[:] = tasks


def _export_in_worker(number: int) -> UnitResult:
    return export_unit(_tasks[number])


def export_unit(task: _Task) -> UnitResult:
    """All samples of one shard; those whose file is there are only counted."""
    dataset, exporter, folder = task.dataset, task.exporter, Path(task.folder)
    shard = dataset.output.shards[task.index]
    norm = dataset.to_post_norm if exporter.needs_norm else None  # loaded once, by the first that needs it
    heads, written, size = [], 0, 0
    for number in range(task.first, task.first + shard.samples):
        head = dataset.read(number, columns=())
        heads.append(head | {"number": number})
        name = exporter.file_name(number, shard.unit, head["sample_id"])
        if not (folder / name).exists():
            record = exporter.record(number, dataset.read(number, exporter.columns), norm)
            write_whole(folder, name, lambda path, record=record: exporter.save(record, path))
            written, size = written + 1, size + (folder / name).stat().st_size
    exporter.finish_unit(folder, shard.unit, heads)
    learnt = [head["input_ids"][head["loss_mask"] == 1].numpy() for head in heads]
    counts = (
        np.bincount(np.concatenate(learnt), minlength=exporter.vocab_size)
        if learnt
        else np.zeros(exporter.vocab_size, np.int64)
    )
    return UnitResult(task.index, written, size, [len(head["input_ids"]) for head in heads], counts)
