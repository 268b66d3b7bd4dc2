"""An output with one fault in every sample, and every marker, checksum and statistic made to fit it.

    python tests/probe/spoil.py KIND OUTPUT SPOILED [--above OUTPUT_OF_LAYERS_PLUS_ONE]

It is what a pipeline with that fault would have written: nothing but the values is wrong. KIND:

    shifted      each auxiliary layer is the one above it (for this alone --above: the same samples, layers + 1)
    wrong_norm   the final state has been through the final norm, where the one before it is expected
    swapped      samples of equal length have each other's states, two by two
"""

import argparse
import shutil
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from hs_ray.manifest import build_manifest
from hs_ray.reader import HiddenStatesDataset
from hs_ray.reader.output import load_markers
from hs_ray.reader.shard import ShardFile
from hs_ray.schema import Marker, Sample, state_checksum
from hs_ray.storage import open_storage
from hs_ray.verify.rows import measure
from hs_ray.writer import ShardWriter

FINAL = "final_pre_norm"
Rows = list[dict[str, Any]]


def shifted(dataset: HiddenStatesDataset, rows: Rows, above: Rows) -> None:
    for row, other in zip(rows, above, strict=True):
        if row["sample_id"] != other["sample_id"]:
            raise ValueError(f"{other['sample_id']} where {row['sample_id']} is")
        row |= {f"hidden_{layer}": other[f"hidden_{layer + 1}"] for layer in dataset.output.spec.layers}


def wrong_norm(dataset: HiddenStatesDataset, rows: Rows, above: Rows) -> None:
    for row in rows:
        row[FINAL] = dataset.to_post_norm(row[FINAL])


def swapped(dataset: HiddenStatesDataset, rows: Rows, above: Rows) -> None:
    by_length: dict[int, Rows] = defaultdict(list)
    for row in rows:
        by_length[len(row["input_ids"])].append(row)
    for equal in by_length.values():
        for one, two in zip(equal[::2], equal[1::2], strict=False):
            for name in dataset.columns:
                one[name], two[name] = two[name], one[name]


KINDS = {kind.__name__: kind for kind in (shifted, wrong_norm, swapped)}


def spoil_unit(kind: str, source: str, target: str, above: str | None, number: int) -> Marker:
    """The unit of shard `number`, spoiled and committed; its marker."""
    torch.set_num_threads(1)  # this is one of several processes
    dataset = HiddenStatesDataset(source)
    shard = dataset.output.shards[number]
    first = sum(earlier.samples for earlier in dataset.output.shards[:number])
    places = range(first, first + shard.samples)
    rows = [dataset[place] for place in places]
    others = HiddenStatesDataset(above) if above else None
    KINDS[kind](dataset, rows, [others[place] for place in places] if others else [])
    storage, spec = open_storage(target), dataset.output.spec
    marker = load_markers(dataset.output.storage)[shard.unit]
    file = ShardFile(dataset.output.storage, shard.path)
    whose = (storage, shard.unit, marker.attempt, marker.epoch)
    writer = ShardWriter(*whose, spec, dataset.output.compression, file.metadata, marker.fingerprint, 0)
    for row in rows:
        states = [row[name].view(torch.uint16).numpy() for name in spec.columns]
        stats = [replace(measure(bits), checksum=state_checksum(bits)) for bits in states]
        ids, mask = row["input_ids"].numpy().astype("int32"), row["loss_mask"].numpy()
        writer.add(Sample(row["sample_id"], row["source"], row["line"], ids, mask), states, stats)
    return writer.commit(marker.engine, marker.seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--above")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    ignore = shutil.ignore_patterns("done", "index")  # markers: each unit gets one of its own
    shutil.copytree(f"{given.source}/_run", f"{given.target}/_run", ignore=ignore)
    output = HiddenStatesDataset(given.source).output
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        one = partial(spoil_unit, given.kind, given.source, given.target, given.above)
        markers = list(pool.map(one, range(len(output.shards))))
    build_manifest(open_storage(given.target), output.run, {marker.unit: marker for marker in markers})
    print(f"{given.kind}: {sum(marker.samples for marker in markers):,} samples", flush=True)


if __name__ == "__main__":
    main()
