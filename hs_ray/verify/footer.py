"""What a shard says of itself, against the run: the JSON in its footer, its columns, one row a row group."""

import json
from typing import Any

import pyarrow.parquet as pq

from hs_ray.schema import FORMAT_VERSION, METADATA_KEY, STATE_DTYPE, Marker, shard_schema
from hs_ray.verify.report import Report
from hs_ray.verify.run import fact


def footer_fits(
    parquet: pq.ParquetFile, path: str, run: dict[str, Any], columns: tuple[str, ...], marker: Marker, report: Report
) -> bool:
    """Whether the rows can be looked at. marker: which names the shard."""
    text = (parquet.metadata.metadata or {}).get(METADATA_KEY)
    if text is None:
        report.add("footer", path, f"no {METADATA_KEY.decode()} entry: a foreign Parquet file")
        return False
    compression = run["config"]["output"]["compression"]
    expected = {"columns": list(columns), "compression": compression}
    _check_metadata(text, path, run, marker, expected, report)
    wanted = shard_schema(columns, compression)
    if not parquet.schema_arrow.equals(wanted):
        report.add(
            "footer",
            path,
            f"columns are {parquet.schema_arrow.names}, they should be {wanted.names}, with the types of the format",
        )
        return False
    if parquet.metadata.num_rows != parquet.num_row_groups:
        report.add(
            "footer",
            path,
            f"{parquet.metadata.num_rows} rows in {parquet.num_row_groups} row groups; one row a group is the format",
        )
        return False
    return True


def _check_metadata(
    text: bytes, path: str, run: dict[str, Any], marker: Marker, expected: dict[str, Any], report: Report
) -> None:
    """The footer's JSON against run.json, the marker and `expected`."""
    try:
        metadata = json.loads(text)
    except ValueError as error:
        metadata = error
    if not isinstance(metadata, dict):
        report.add("footer", path, f"its {METADATA_KEY.decode()} entry is damaged ({metadata!r:.120})")
        return
    expected = expected | {"fingerprint": run["fingerprint"], "revision": run["model"].get("revision")}
    expected |= {name: run["spec"][name] for name in ("layers", "final", "hidden_size", "num_hidden_layers")}
    expected |= {"format_version": FORMAT_VERSION, "dtype": STATE_DTYPE, "byte_order": "little"}
    written = {"unit": marker.unit, "attempt": marker.attempt}  # by the writer; older shards may be without
    expected |= {name: value for name, value in written.items() if name in metadata}
    for name, value in expected.items():
        _compare(name, metadata.get(name), value, path, report)
    _check_origin(metadata, path, run, report)


def _check_origin(metadata: dict[str, Any], path: str, run: dict[str, Any], report: Report) -> None:
    """Model and versions. A resume may have a local model under another path, a hub model under its other name, and
    other versions of what does not decide the values: of these the shard's own are right."""
    if not isinstance(metadata.get("model"), str):
        report.add("footer", path, f"model is {metadata.get('model')!r:.80}, no name")
    for name, part in (("sglang", "sglang"), ("patch", "patches/sglang")):
        wanted = fact(run, f"versions.{name}")
        if isinstance(parts := run.get("fingerprint_parts"), dict):
            wanted = parts.get(part, wanted)  # where the two differ, run.json is told, and not every shard
        if wanted is not ...:
            found = fact(metadata, f"versions.{name}")
            _compare(f"versions.{name}", None if found is ... else found, wanted, path, report)


def _compare(name: str, found: Any, wanted: Any, path: str, report: Report) -> None:
    """As JSON, in which 1, 1.0 and true are three things."""
    if json.dumps(found, sort_keys=True) != json.dumps(wanted, sort_keys=True):
        report.add("footer", path, f"{name} is {found!r:.200}, the run's is {wanted!r:.200}")
