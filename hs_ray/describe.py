"""What an output holds, for people: counts, layers in both spellings, sizes, lengths, rejects, one sample's norms.

Shapes: S tokens, H hidden_size.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hs_ray.errors import ShardError
from hs_ray.plan.estimates import size
from hs_ray.reader import HiddenStatesDataset, Output
from hs_ray.reader.output import load_markers
from hs_ray.reader.run import damaged_run
from hs_ray.reader.shard import READ_ERRORS
from hs_ray.schema import REJECTED, SAMPLES
from hs_ray.storage import Storage, open_storage, raise_outage
from hs_ray.verify.run import fact, read_run

BAR = 40  # characters of the longest bar
SHOWN = {"versions": dict, "plan.truncated": int}  # of run.json, where it has them


@dataclass(frozen=True)
class ColumnNorms:
    """Of one column of one sample: L2 norms of its tokens' states, and the largest absolute value."""

    column: str
    first: float
    median: float
    largest: float
    absmax: float


@dataclass(frozen=True)
class Description:
    """Everything that `describe` shows. histogram: (up to this many tokens, samples)."""

    path: str
    complete: bool
    model: dict[str, Any]
    versions: dict[str, Any]
    started: str
    layers: list[dict[str, Any]]
    final: str
    hidden_size: int
    num_hidden_layers: int
    compression: str
    units: int
    units_planned: int
    samples: int
    failed: int
    tokens: int
    bytes: int
    raw_bytes: int  # of the states alone, before compression
    plan: dict[str, Any]
    lengths: dict[str, int]  # min, median, mean, max
    histogram: list[tuple[int, int]]
    rejects: dict[str, int]  # by code, failed samples included
    sample: dict[str, Any] = field(default_factory=dict)  # sample_id, source, line, num_tokens, learnt
    norms: list[ColumnNorms] = field(default_factory=list)


def describe(path: str, storage_options: Mapping[str, Any] | None = None) -> Description:
    """Look at an output, finished or not. Raises OutputError where there is none, ShardError for damage in its way."""
    _check_run(open_storage(path, storage_options))
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "storage_options": storage_options, "incomplete": True}
    dataset = HiddenStatesDataset(path, **options)
    output, plan = dataset.output, dataset.output.run["plan"]
    markers = load_markers(output.storage)
    failed = [reject for marker in markers.values() for reject in marker.failed]
    lengths = _planned_lengths(output, set(markers))
    sample = dataset.read(0) if output.samples else {}
    return Description(
        path=output.storage.root,
        complete=output.complete,
        model=output.run["model"],
        versions=output.run.get("versions", {}),
        started=str(output.run.get("started", "")),
        layers=output.run["spec"]["layers"],
        final=output.spec.final,
        hidden_size=output.spec.hidden_size,
        num_hidden_layers=output.spec.num_hidden_layers,
        compression=output.compression,
        units=len(markers),
        units_planned=plan["units"],
        samples=output.samples,
        failed=len(failed),
        tokens=output.tokens,
        bytes=output.bytes,
        raw_bytes=output.tokens * output.spec.bytes_per_token,
        plan={name: plan[name] for name in ("lines", "blank", "samples", "rejected", "truncated") if name in plan},
        lengths=_summary(lengths),
        histogram=_histogram(lengths),
        rejects=dict((_rejected(output) + Counter(reject.code for reject in failed)).most_common()),
        sample={name: sample[name] for name in ("sample_id", "source", "line") if sample}
        | ({"num_tokens": len(sample["input_ids"]), "learnt": int(sample["loss_mask"].sum())} if sample else {}),
        norms=[_norms(name, sample[name]) for name in output.spec.columns] if sample else [],
    )


def _check_run(storage: Storage) -> None:
    """run.json, with what is only shown of it. Raises OutputError where that cannot be."""
    run = read_run(storage)
    wrong = [name for name, kind in SHOWN.items() if fact(run, name) is not ... and type(fact(run, name)) is not kind]
    if any(not {"column", "output_of_layer"} <= layer.keys() for layer in run["spec"]["layers"]):
        wrong.append("spec.layers")
    if wrong:
        raise damaged_run(storage, wrong)


def _planned_lengths(output: Output, units: set[int]) -> np.ndarray:
    """Tokens of every planned sample of the units that are committed: the lengths of the loss masks, which take some
    hundredth of the ids' bytes."""
    parts = []
    for info in output.storage.list(SAMPLES):
        if not info.path.endswith(".parquet"):
            continue
        table = _read(output.storage, info.path, ["loss_mask", "unit"])
        sizes = table.column("loss_mask").combine_chunks().value_lengths().to_numpy()
        parts.append(sizes[np.isin(table.column("unit").to_numpy(), sorted(units))])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _rejected(output: Output) -> Counter[str]:
    if not output.storage.exists(REJECTED):
        return Counter()
    return Counter(_read(output.storage, REJECTED, ["code"]).column("code").to_pylist())


def _read(storage: Storage, path: str, columns: list[str]) -> pa.Table:
    """Columns of a file of the plan. Raises ShardError, naming it, where they cannot be read."""
    try:
        with storage.open(path) as file:
            table = pq.ParquetFile(file).read(columns=columns)
    except READ_ERRORS as error:
        raise_outage(error)
        raise ShardError(f"{storage.root}/{path}: cannot be read ({error}); restore the file") from error
    if missing := set(columns) - set(table.column_names):
        raise ShardError(f"{storage.root}/{path}: no file of a plan, it has no {', '.join(sorted(missing))}")
    return table


def _summary(lengths: np.ndarray) -> dict[str, int]:
    if not len(lengths):
        return {}
    return {
        "min": int(lengths.min()),
        "median": int(np.median(lengths)),
        "mean": int(lengths.mean()),
        "max": int(lengths.max()),
    }


def _histogram(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Samples by length, in powers of two: (up to this many tokens, samples)."""
    if not len(lengths):
        return []
    power = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return [(2**p, int((power == p).sum())) for p in range(int(power.min()), int(power.max()) + 1)]


def _norms(column: str, state: torch.Tensor) -> ColumnNorms:
    norms = state.float().norm(dim=1)
    return ColumnNorms(
        column, float(norms[0]), float(norms.median()), float(norms.max()), float(state.float().abs().max())
    )


def layer_text(layer: dict[str, Any]) -> str:
    """Both spellings of a layer id."""
    output_of = layer["output_of_layer"]
    return f"{layer['id']} ({'the embeddings' if output_of is None else f'output of layer {output_of}'})"


def facts(d: Description) -> list[tuple[str, str]]:
    """The description as name and value, in the order of reading."""
    ratio = (
        f", {d.bytes / d.raw_bytes:.3f} of the states' {size(d.raw_bytes)}"
        if d.compression != "none" and d.raw_bytes
        else ""
    )
    share = f"{d.units:,} of {d.units_planned:,} units" + ("" if d.complete else ", not complete")
    rows = [
        ("output", d.path),
        ("state", f"{'complete' if d.complete else 'unfinished'}, {share}"),
        (
            "model",
            f"{d.model['name']} ({d.model.get('architecture')}, {d.num_hidden_layers} layers of width {d.hidden_size})",
        ),
        ("started", d.started),
        ("layers", ", ".join(layer_text(layer) for layer in d.layers)),
        ("final", d.final),
        ("samples", f"{d.samples:,} with states, {d.failed:,} failed"),
        ("input", ", ".join(f"{value:,} {name}" for name, value in d.plan.items())),
        ("tokens", f"{d.tokens:,}"),
        ("size", f"{size(d.bytes)} in {d.units:,} shards ({d.compression}{ratio})"),
        ("tokens a sample", ", ".join(f"{name} {value:,}" for name, value in d.lengths.items())),
    ]
    return rows + [("versions", ", ".join(f"{name} {value}" for name, value in d.versions.items()))]


def text(d: Description) -> str:
    """The description for a terminal."""
    lines = [f"{name:<16} {value}" for name, value in facts(d)]
    if d.histogram:
        most = max(count for _, count in d.histogram)
        lines += ["", "samples by length (tokens, up to)"]
        lines += [f"{limit:>10,} {count:>9,} {'#' * round(BAR * count / most)}" for limit, count in d.histogram]
    if d.rejects:
        lines += ["", "lines without states, by code"] + [f"{count:>10,} {code}" for code, count in d.rejects.items()]
    if d.norms:
        s = d.sample
        lines += [
            "",
            f"sample {s['sample_id']} ({s['source']} line {s['line']}): {s['num_tokens']} tokens, {s['learnt']} learnt",
        ]
        lines += [f"{'L2 norm of':<16} {'first token':>12} {'median':>12} {'largest':>12} {'absmax':>12}"]
        lines += [
            f"{n.column:<16} {n.first:12.2f} {n.median:12.2f} {n.largest:12.2f} {n.absmax:12.2f}" for n in d.norms
        ]
    return "\n".join(lines)
