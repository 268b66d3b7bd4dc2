"""A complete small output by the contract, without an engine: the states of a tiny random Llama through transformers.

    made = make_output(tmp_path / "out")   # 3 units, 12 samples, one of them failed; 2 rejected lines, 1 blank one
    rewrite(made, unit, change)            # damage a shard; its file's marker and the manifest are made to fit

Written with pyarrow and json alone, so that what is tested here does not test itself.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hs_ray import schema
from hs_ray.model import model_digest
from hs_ray.schema import CaptureSpec, ColumnStats, Marker, Reject

N, H, VOCAB = 8, 64, 300
FINGERPRINT = "f" * 64
PREFIX = [1, 7, 9, 11, 13, 15, 17, 19]  # the shared system prompt of most samples
LENGTHS = [40, 5, 64, 33, 90, 40, 17, 128, 50, 71, 12, 1]
FAILED = 6  # this sample of the plan failed in the engine
PLAN_COLUMNS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("unit", pa.int32()),
    ]
)
REJECT_COLUMNS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("code", pa.string()),
        ("message", pa.string()),
    ]
)


@dataclass
class MadeOutput:
    path: Path
    model: Path
    spec: CaptureSpec
    compression: str
    samples: list[schema.Sample]  # the plan, in order
    states: list[dict[str, np.ndarray]]  # of each sample, uint16 [S, H] a column
    unit_of: list[int]

    @property
    def committed(self) -> list[int]:
        return [i for i in range(len(self.samples)) if i != FAILED]

    def shard(self, unit: int) -> Path:
        return self.path / schema.shard_path(unit, "0001-aaaa")


def make_model(folder: Path, layers: int = N) -> Path:
    """A tiny random Llama in bf16; its layers are wide apart, so that one in place of another shows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=H,
            intermediate_size=2 * H,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.15,
        )
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.model.norm.weight, 1.0, 0.2)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def true_states(model_path: Path, samples: list[schema.Sample], spec: CaptureSpec) -> list[dict[str, np.ndarray]]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    pre_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: pre_norm.append(args[0][0]))
    result = []
    for sample in samples:
        with torch.no_grad():
            tuple_of = model.model(torch.tensor(sample.input_ids)[None].long(), output_hidden_states=True).hidden_states
        by_column = {
            f"hidden_{i}": (tuple_of[i][0] if i < spec.num_hidden_layers else pre_norm[-1]) for i in spec.layers
        }
        by_column |= {"final_pre_norm": pre_norm[-1], "final_post_norm": tuple_of[-1][0]}
        result.append({name: by_column[name].contiguous().view(torch.uint16).numpy().copy() for name in spec.columns})
    return result


def make_samples(lengths: list[int] = LENGTHS) -> list[schema.Sample]:
    random = np.random.default_rng(5)
    samples = []
    for line, length in enumerate(lengths):
        ids = np.concatenate([PREFIX, random.integers(20, VOCAB, length)])[:length].astype(np.int32)
        if line == 3:
            ids[:] = 42  # one token over and over: its states repeat, rightly
        mask = (np.arange(length) >= min(len(PREFIX), length // 2)).astype(np.uint8)
        samples.append(schema.Sample(f"id-{line}", "train.jsonl", line + line // 4, ids, mask))
    return samples


def make_output(
    path: Path,
    *,
    layers: tuple[int, ...] = (2, 4, 5),
    final: str = "pre_norm",
    compression: str = "none",
    per_unit: int = 4,
    lengths: list[int] = LENGTHS,
    complete: bool = True,
) -> MadeOutput:
    model = make_model(path.parent / "model")
    spec = CaptureSpec(layers, final, N, H)
    samples = make_samples(lengths)
    unit_of = [i // per_unit for i in range(len(samples))]
    made = MadeOutput(path, model, spec, compression, samples, true_states(model, samples, spec), unit_of)
    for folder in (schema.SHARDS, schema.SAMPLES, schema.DONE, schema.REJECTS, schema.TMP, schema.ATTEMPTS):
        (path / folder).mkdir(parents=True)
    _write_plan(made)
    for unit in range(max(unit_of) + 1):
        write_unit(made, unit)
    _write_run(made)
    if complete:
        write_manifest(made)
    return made


def metadata(made: MadeOutput) -> dict[str, Any]:
    return schema.shard_metadata(
        made.spec,
        model=str(made.model),
        revision=None,
        fingerprint=FINGERPRINT,
        compression=made.compression,
        versions={"sglang": "0.5.23"},
    )


def _write_plan(made: MadeOutput) -> None:
    with pq.ParquetWriter(made.path / schema.SAMPLES / "part-00000.parquet", PLAN_COLUMNS) as writer:
        for unit in range(max(made.unit_of) + 1):
            chosen = [s for s, u in zip(made.samples, made.unit_of, strict=True) if u == unit]
            writer.write_table(pa.Table.from_pylist([{**asdict(s), "unit": unit} for s in chosen], schema=PLAN_COLUMNS))
    rejected = [
        {"sample_id": None, "source": "train.jsonl", "line": n, "code": "not_json", "message": "..."}
        for n in (100, 101)
    ]
    pq.write_table(pa.Table.from_pylist(rejected, schema=REJECT_COLUMNS), made.path / schema.REJECTED)


def sample_rows(made: MadeOutput, index: int) -> list[dict[str, Any]]:
    """The rows of a shard that a sample becomes."""
    sample, rows = made.samples[index], []
    for start, length in made.spec.pieces(sample.num_tokens):
        part = slice(start, start + length)
        row = {
            "sample_id": sample.sample_id,
            "source": sample.source,
            "line": sample.line,
            "num_tokens": length,
            "sample_tokens": sample.num_tokens,
            "input_ids": sample.input_ids[part],
            "loss_mask": sample.loss_mask[part],
            "token_start": start,
        }
        rows.append(row | {name: made.states[index][name][part].copy() for name in made.spec.columns})
    return rows


def to_float(states: np.ndarray) -> np.ndarray:
    """bf16 bits, uint16 -> float32, same shape."""
    return (states.astype(np.uint32) << 16).view(np.float32)


def column_stats(states: np.ndarray) -> ColumnStats:
    values = to_float(states).astype(np.float64)
    finite = np.isfinite(values).all(1)
    kept = values[finite]
    return ColumnStats(
        len(values),
        float((kept**2).sum()),
        float(np.abs(kept).max(initial=0)),
        int((~finite).sum()),
        int((values == 0).all(1).sum()),
    )


def checksums(made: MadeOutput, rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Of every sample and column: sum over tokens t, from 1, of t times the sum of its bits as int16, modulo 2^64."""
    found: dict[str, list[int]] = {}
    for row in rows:
        sums = found.setdefault(row["sample_id"], [0] * len(made.spec.columns))
        for c, name in enumerate(made.spec.columns):
            for t, bits in enumerate(row[name].view(np.int16), row["token_start"] + 1):
                sums[c] = (sums[c] + t * int(bits.sum(dtype=np.int64))) % 2**64
    return found


def write_unit(
    made: MadeOutput,
    unit: int,
    rows: list[dict[str, Any]] | None = None,
    stats: bool = True,
    fit_checksums: bool = False,
) -> Marker:
    """A shard and its marker, out of `rows` (states as uint16 arrays); the true rows if None.

    stats: make the marker's statistics fit, fit_checksums: and the samples' checksums; else those of the true rows
    stay.
    """
    committed = [i for i in made.committed if made.unit_of[i] == unit]
    true_rows = [row for i in committed for row in sample_rows(made, i)]
    rows = true_rows if rows is None else rows
    shard_schema = schema.shard_schema(made.spec.columns, made.compression, metadata(made))
    path = made.shard(unit)
    codecs: dict[str, Any] = {name: "zstd" if name.endswith("_hi") else "none" for name in shard_schema.names}
    with pq.ParquetWriter(
        path, shard_schema, compression=codecs, use_dictionary=False, write_statistics=False
    ) as writer:
        for row in rows:
            writer.write_table(pa.Table.from_pylist([_stored(row, made)], schema=shard_schema), row_group_size=1)
    measured = rows if stats else true_rows
    failed = [i for i in [FAILED] if i < len(made.samples) and made.unit_of[i] == unit]
    marker = Marker(
        unit=unit,
        attempt="0001-aaaa",
        epoch=1,
        fingerprint=FINGERPRINT,
        shard=schema.shard_path(unit, "0001-aaaa"),
        bytes=0,
        sha256="",
        samples=len({row["sample_id"] for row in rows}),
        rows=len(rows),
        tokens=sum(row["num_tokens"] for row in rows),
        columns={name: column_stats(np.concatenate([row[name] for row in measured])) for name in made.spec.columns},
        checksums=checksums(made, rows if fit_checksums else true_rows),
        failed=[
            Reject(made.samples[i].sample_id, "train.jsonl", made.samples[i].line, "engine_error", "...")
            for i in failed
        ],
        engine="e0",
        seconds=1.0,
    )
    return fit_marker(made, marker)


def fit_marker(made: MadeOutput, marker: Marker) -> Marker:
    """The marker with the size and the checksum that its shard has now, written."""
    data = made.shard(marker.unit).read_bytes()
    marker = replace(marker, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (made.path / schema.marker_path(marker.unit)).write_text(marker.to_json())
    return marker


def read_marker(made: MadeOutput, unit: int) -> Marker:
    return Marker.from_json((made.path / schema.marker_path(unit)).read_text())


def _stored(row: dict[str, Any], made: MadeOutput) -> dict[str, Any]:
    stored = {name: value for name, value in row.items() if name not in made.spec.columns}
    for name in made.spec.columns:
        if made.compression == "split_zstd":
            halves = row[name].reshape(-1).view(np.uint8)
            stored |= {f"{name}_hi": halves[1::2].tobytes(), f"{name}_lo": halves[0::2].tobytes()}
        else:
            stored[name] = row[name].tobytes()
    return stored


def _write_run(made: MadeOutput) -> None:
    from safetensors import safe_open

    spec, tokens = made.spec, sum(s.num_tokens for s in made.samples)
    run = {
        "format_version": 1,
        "fingerprint": FINGERPRINT,
        "fingerprint_parts": {},
        "config": {
            "output": {"compression": made.compression},
            "model": {"path": str(made.model), "trust_remote_code": False},
        },
        "versions": {"sglang": "0.5.23"},
        "started": "2026-11-29T00:00:00+00:00",
        "command": ["jobs/extract.py"],
        "model": {
            "name": "tiny",
            "path": str(made.model),
            "revision": None,
            "architecture": "LlamaForCausalLM",
            "num_hidden_layers": N,
            "hidden_size": H,
            "vocab_size": VOCAB,
            "context_length": 512,
            "digest": model_digest(str(made.model), "tiny", None),
            "tokenizer_path": str(made.model),
        },
        "spec": {
            "layers": schema.layer_spellings(spec.layers),
            "final": spec.final,
            "num_hidden_layers": N,
            "hidden_size": H,
            "columns": list(spec.columns),
        },
        "plan": {
            "lines": len(made.samples) + 3,
            "blank": 1,
            "samples": len(made.samples),
            "tokens": tokens,
            "truncated": 0,
            "rejected": 2,
            "rejects_by_code": {"not_json": 2},
            "units": max(made.unit_of) + 1,
            "units_per_file": 1000,
        },
        "sources": [],
    }
    (made.path / schema.RUN_JSON).write_text(json.dumps(run))
    with safe_open(made.model / "model.safetensors", framework="pt") as tensors:
        weight = tensors.get_tensor("model.norm.weight")
    write_norm(made, weight)


def write_norm(made: MadeOutput, weight: torch.Tensor, **facts: str) -> None:
    """The final norm's file, weight [H]; without the digest that newer files have, unless it is among `facts`."""
    from safetensors.torch import save_file

    save_file({"weight": weight}, made.path / schema.FINAL_NORM, {"eps": "1e-06", "kind": "rms_norm"} | facts)


def write_manifest(made: MadeOutput) -> None:
    markers = [read_marker(made, unit) for unit in range(max(made.unit_of) + 1)]
    failed = [reject for marker in markers for reject in marker.failed]
    spec = made.spec
    manifest = {
        "format_version": 1,
        "complete": True,
        "fingerprint": FINGERPRINT,
        "model": "tiny",
        "layers": schema.layer_spellings(spec.layers),
        "final": spec.final,
        "hidden_size": H,
        "counts": {
            "lines": len(made.samples) + 3,
            "blank": 1,
            "rejected": 2,
            "rejects_by_code": {"not_json": 2, "engine_error": len(failed)},
            "samples": len(made.samples),
            "committed": sum(m.samples for m in markers),
            "failed": len(failed),
            "tokens": sum(m.tokens for m in markers),
            "rows": sum(m.rows for m in markers),
            "bytes": sum(m.bytes for m in markers),
            "units": len(markers),
        },
        "shards": [
            {
                "unit": m.unit,
                "path": m.shard,
                "samples": m.samples,
                "rows": m.rows,
                "tokens": m.tokens,
                "bytes": m.bytes,
                "sha256": m.sha256,
            }
            for m in markers
            if m.shard
        ],
    }
    (made.path / schema.MANIFEST).write_text(json.dumps(manifest))
    rejects = [
        {"sample_id": None, "source": "train.jsonl", "line": n, "code": "not_json", "message": "..."}
        for n in (100, 101)
    ]
    lines = [json.dumps(r) for r in rejects + [asdict(r) for r in failed]]
    (made.path / schema.REJECTS / "rejects.jsonl").write_text("\n".join(lines) + "\n")


Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def rewrite(made: MadeOutput, unit: int, change: Change, *, stats: bool = True, fit_checksums: bool = False) -> None:
    """Write a unit again with changed rows; size, sha256, counts and statistics of marker and manifest are made to fit.

    fit_checksums: those of the samples, too, so that only a check of content or a reference can notice.
    """
    rows = [row for i in made.committed if made.unit_of[i] == unit for row in sample_rows(made, i)]
    write_unit(made, unit, change(rows), stats, fit_checksums)
    write_manifest(made)


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
