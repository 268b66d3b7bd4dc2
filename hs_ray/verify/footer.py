"""What a shard says of itself, against the run: the JSON in its footer, its columns, one row a row group."""

import json
from typing import Any

import pyarrow.parquet as pq

from hs_ray.schema import METADATA_KEY, shard_schema
from hs_ray.verify.report import Report


def footer_fits(
    parquet: pq.ParquetFile, path: str, run: dict[str, Any], columns: tuple[str, ...], report: Report
) -> bool:
    """Whether the rows can be looked at."""
    text = (parquet.metadata.metadata or {}).get(METADATA_KEY)
    if text is None:
        report.add("footer", path, f"no {METADATA_KEY.decode()} entry: a foreign Parquet file")
        return False
    compression = run["config"]["output"]["compression"]
    _check_metadata(text, path, run, {"columns": list(columns), "compression": compression}, report)
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


def _check_metadata(text: bytes, path: str, run: dict[str, Any], expected: dict[str, Any], report: Report) -> None:
    """The footer's JSON against run.json and `expected`."""
    try:
        metadata = json.loads(text)
    except ValueError as error:
        metadata = error
    if not isinstance(metadata, dict):
        report.add("footer", path, f"its {METADATA_KEY.decode()} entry is damaged ({metadata!r:.120})")
        return
    expected = expected | {"fingerprint": run["fingerprint"]}
    expected |= {name: run["spec"][name] for name in ("layers", "final", "hidden_size", "num_hidden_layers")}
    for name, value in expected.items():
        if metadata.get(name) != value:
            report.add("footer", path, f"{name} is {metadata.get(name)!r}, the run's is {value!r}")
