"""Reading a plan back, and run.json: its existence says that the plan is complete."""

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hs_ray.config import to_plain
from hs_ray.errors import OutputError
from hs_ray.inputs import Source
from hs_ray.plan.build import PlanSummary
from hs_ray.plan.files import UNITS_KEY, part_path, unit_digest
from hs_ray.plan.resolved import ResolvedJob
from hs_ray.schema import FORMAT_VERSION, RUN_JSON, CaptureSpec, Sample, layer_spellings, unit_name
from hs_ray.storage import Storage, raise_outage

IO_THREADS = 16
# Arrow's own errors are among these, and what the decoding of damaged rows can end in.
DAMAGE = (OSError, ValueError, LookupError, RuntimeError, ArithmeticError, TypeError, AttributeError)


def read_unit(storage: Storage, unit: int, units_per_file: int) -> list[Sample]:
    """The samples of a unit, in input order. Raises OutputError if the plan's file is missing or damaged.

    An outage stays the OSError that it is: the unit is worth another try, and nothing is to be restored.
    """
    path = part_path(unit, units_per_file)
    try:
        with storage.open(path) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            table = parquet.read_row_group(unit % units_per_file)
        _check_digest(table, parquet.metadata, unit % units_per_file)
        return _samples(table)
    except DAMAGE as error:
        raise_outage(error)
        raise OutputError(
            f"output.path = {storage.root}: {path}, the plan of {unit_name(unit)}, cannot be read ({error}); "
            f"restore the file, or start a run in another folder"
        ) from error


def _check_digest(table: pa.Table, metadata: pq.FileMetaData, group: int) -> None:
    """Raises ValueError if the rows are not those that were planned; plans of earlier releases cannot tell."""
    listed = (metadata.metadata or {}).get(UNITS_KEY.encode())
    if listed is not None and json.loads(listed)[group][3:] not in ([], [unit_digest(table)]):
        raise ValueError("its rows are not those that were planned")


def _samples(table: pa.Table) -> list[Sample]:
    lists = []
    for name in ("input_ids", "loss_mask"):
        column = table[name].combine_chunks()
        values, offsets = column.values.to_numpy(), column.offsets.to_pylist()
        lists.append([values[first:last] for first, last in zip(offsets, offsets[1:], strict=False)])
    names = [table[name].to_pylist() for name in ("sample_id", "source", "line")]
    return [Sample(*fields) for fields in zip(*names, *lists, strict=True)]


def unit_counts(storage: Storage, units: int, units_per_file: int) -> list[tuple[int, int]]:
    """(samples, tokens) of every unit, from the files' footers."""

    def counts(path: str) -> list[tuple[int, int]]:
        with storage.open(path) as file:
            metadata = pq.read_metadata(file).metadata
        return [(samples, tokens) for _, samples, tokens, *_ in json.loads(metadata[UNITS_KEY.encode()])]

    with ThreadPoolExecutor(IO_THREADS) as pool:
        parts = list(pool.map(counts, [part_path(unit, units_per_file) for unit in range(0, units, units_per_file)]))
    return [item for part in parts for item in part]


def spec_record(spec: CaptureSpec) -> dict[str, Any]:
    """A CaptureSpec as run.json has it: layers in both spellings."""
    return {
        "layers": layer_spellings(spec.layers),
        "final": spec.final,
        "num_hidden_layers": spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "columns": list(spec.columns),
    }


def write_run(
    storage: Storage,
    resolved: ResolvedJob,
    summary: PlanSummary,
    sources: Sequence[Source],
    fingerprint: tuple[str, Mapping[str, str]],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Write `_run/run.json`, after the plan's files; returns its content. No secrets in it: `config` refuses them."""
    run = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint[0],
        "fingerprint_parts": dict(fingerprint[1]),
        "config": to_plain(resolved.job),
        "versions": dict(versions),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "model": asdict(resolved.model),
        "spec": spec_record(resolved.spec),
        "plan": summary.to_dict(),
        "sources": [asdict(source) for source in sources],
    }
    storage.write(RUN_JSON, json.dumps(run, indent=1).encode())
    return run


def supersede(storage: Storage) -> None:
    """Before an output in which nothing was committed is planned anew: what is left of its run.json fits no
    configuration, so that no later start takes the files of one plan for those of another."""
    run = load_run(storage)
    if run is not None:
        storage.write(RUN_JSON, json.dumps(run | {"fingerprint": "", "fingerprint_parts": {}}).encode())


def load_run(storage: Storage) -> dict[str, Any] | None:
    """The content of run.json; None if there is none. Raises OutputError for one that is not ours."""
    try:
        run = json.loads(storage.read_bytes(RUN_JSON))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OutputError(
            f"output.path = {storage.root}: {RUN_JSON} is damaged ({error}); choose another folder"
        ) from error
    if not isinstance(run, dict) or run.get("format_version") != FORMAT_VERSION:
        found = run.get("format_version") if isinstance(run, dict) else "no version"
        raise OutputError(
            f"output.path = {storage.root}: {RUN_JSON} has format {found}, this hs_ray writes {FORMAT_VERSION}; "
            f"choose another folder"
        )
    return run


def load_summary(run: Mapping[str, Any]) -> PlanSummary:
    return PlanSummary(**run["plan"])
