"""Small plans: a job, its input, the units that come of it."""

import json
from pathlib import Path
from typing import Any

from hs_ray.config import ExtractJob
from hs_ray.inputs import iter_chunk, list_sources, split_sources
from hs_ray.model import ModelInfo
from hs_ray.plan import (
    PlanSummary,
    ResolvedJob,
    build_plan,
    read_unit,
)
from hs_ray.schema import CaptureSpec
from hs_ray.storage import Storage, open_storage

MODEL = ModelInfo("m", "/m", None, "LlamaForCausalLM", 12, 8, 100, 64, "digest", "/m")


def job(tmp_path: Path, **changes: Any) -> ResolvedJob:
    """Two columns of 8 numbers: 32 bytes a token; a unit of 320 bytes is 10 tokens."""
    made = ExtractJob(max_seq_len=64)
    made.input.path = str(tmp_path / "in")
    made.output.path = str(tmp_path / "out")
    made.output.shard_bytes = "320"
    for key, value in changes.items():
        node, name = (
            (made, key) if hasattr(made, key) else (made.input if hasattr(made.input, key) else made.output, key)
        )
        setattr(node, name, value)
    return ResolvedJob(made, MODEL, CaptureSpec((2,), "pre_norm", 12, 8))


def write(tmp_path: Path, lines: list[Any], name: str = "a.jsonl") -> None:
    """Lines given as records, or raw."""
    (tmp_path / "in").mkdir(exist_ok=True)
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    (tmp_path / "in" / name).write_bytes(data)


def build(resolved: ResolvedJob, chunk_bytes: int = 2**20, table_bytes: int = 2**20) -> tuple[Storage, PlanSummary]:
    storage = open_storage(str(resolved.job.output.path))
    sources = list_sources(resolved.job.input)
    tables = (
        table
        for chunk in split_sources(sources, chunk_bytes)
        for table in iter_chunk(chunk, resolved.tokenize_settings, table_bytes)
    )
    return storage, build_plan(storage, tables, resolved)


def units(storage: Storage, summary: PlanSummary) -> list[list[str]]:
    return [[s.sample_id for s in read_unit(storage, u, summary.units_per_file)] for u in range(summary.units)]


def tokens(id: str | None, count: int, **extra: Any) -> dict[str, Any]:
    return ({"id": id} if id else {}) | {"input_ids": list(range(count)), **extra}
