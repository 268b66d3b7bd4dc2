"""Markers -> `manifest.json` and `_rejects/`, and the sum that shows that no line of the input was lost."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow.parquet as pq

from hs_ray.errors import HsRayError, OutputError
from hs_ray.schema import FINAL_NORM, FORMAT_VERSION, MANIFEST, REJECTED, REJECTS, Marker, Reject
from hs_ray.storage import Storage

REJECTS_PER_FILE = 100_000


def build_manifest(storage: Storage, run: dict[str, Any], markers: dict[int, Marker]) -> dict[str, Any]:
    """Check that nothing is lost, write `_rejects/*.jsonl` and last `manifest.json`; returns its content.

    run: `_run/run.json` (`fingerprint`, `model`, `spec`, `plan`); markers: from `read_markers`.
    `complete` is true when every unit has its marker. Raises HsRayError, with the sum, if lines are not
    samples + rejected + blank, or samples of a complete run not committed + failed; OutputError for a damaged
    file of the final norm.
    """
    plan, spec = run["plan"], run["spec"]
    committed = sum(marker.samples for marker in markers.values())
    failed = sum(len(marker.failed) for marker in markers.values())
    complete = sorted(markers) == list(range(plan["units"]))
    check_conservation(plan, committed, failed, complete)
    _write_rejects(storage, plan["rejected"], markers)
    shards = [
        {"unit": m.unit, "path": m.shard, "samples": m.samples, "rows": m.rows, "tokens": m.tokens}
        | {"bytes": m.bytes, "sha256": m.sha256}
        | ({"node": m.node} if m.node else {})
        for _, m in sorted(markers.items())
        if m.shard is not None
    ]
    counts = {key: plan[key] for key in ("lines", "blank", "rejected", "rejects_by_code", "samples", "units")}
    counts |= {"committed": committed, "failed": failed}
    counts |= {key: sum(getattr(m, key) for m in markers.values()) for key in ("tokens", "rows", "bytes")}
    model = run["model"]
    head = {
        "format_version": FORMAT_VERSION,
        "complete": complete,
        "fingerprint": run["fingerprint"],
        "model": model.get("name") if isinstance(model, dict) else model,
        "revision": model.get("revision") if isinstance(model, dict) else None,
        "num_hidden_layers": spec["num_hidden_layers"],
        "hidden_size": spec["hidden_size"],
        "layers": spec["layers"],
        "final": spec["final"],
        "counts": counts,
    }
    if norm := _norm_sha256(storage):
        head["final_norm"] = norm
    if nodes := sorted({m.node for m in markers.values() if m.node}):
        head["nodes"] = nodes
    storage.write(MANIFEST, _one_shard_a_line(head, shards).encode())
    return head | {"shards": shards}


def _norm_sha256(storage: Storage) -> str | None:
    """What the final norm's file says of its content; None where there is none, or none that says it.

    In the manifest, because a file of another model's norm is in order in itself.
    """
    try:
        data = storage.read_bytes(FINAL_NORM)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        found: str | None = header["__metadata__"].get("sha256")
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, IsADirectoryError) as error:
        raise OutputError(
            f"output.path = {storage.root}: {FINAL_NORM} is damaged ({error!r}); remove it and run the same command "
            "again, which writes it anew"
        ) from None
    return found


def _one_shard_a_line(head: dict[str, Any], shards: list[dict[str, Any]]) -> str:
    lines = ",\n  ".join(json.dumps(shard) for shard in shards)
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "shards": [\n  {lines}\n ]\n}}\n'


def check_conservation(plan: dict[str, Any], committed: int, failed: int, complete: bool) -> None:
    """Raises HsRayError unless every line, and in a complete run every sample, is accounted for once."""
    lines, samples = plan["lines"], plan["samples"]
    if lines != samples + plan["rejected"] + plan["blank"]:
        raise HsRayError(
            f"lines do not add up: {lines} lines, but {samples} samples + {plan['rejected']} rejected + "
            f"{plan['blank']} blank = {samples + plan['rejected'] + plan['blank']}"
        )
    if committed + failed > samples or (complete and committed + failed != samples):
        raise HsRayError(
            f"samples do not add up: {samples} planned, but {committed} committed + {failed} failed = "
            f"{committed + failed}"
        )


def _write_rejects(storage: Storage, rejected: int, markers: dict[int, Marker]) -> None:
    """Every line without states, as JSON lines: those refused at planning, and the samples that failed."""
    old = {info.path for info in storage.list(REJECTS)}
    failed = (reject for _, marker in sorted(markers.items()) for reject in marker.failed)
    for name, rejects in (("input", _rejected_lines(storage, rejected)), ("failed", failed)):
        for path, content in _reject_files(name, rejects):
            storage.write(path, content)
            old.discard(path)
    for path in old:
        storage.remove(path)


def _reject_files(name: str, rejects: Iterable[Reject]) -> Iterator[tuple[str, bytes]]:
    lines: list[str] = []
    number = 0
    for reject in rejects:
        lines.append(json.dumps(vars(reject), ensure_ascii=False))
        if len(lines) == REJECTS_PER_FILE:
            yield f"{REJECTS}/{name}-{number:05d}.jsonl", ("\n".join(lines) + "\n").encode()
            lines, number = [], number + 1
    if lines:
        yield f"{REJECTS}/{name}-{number:05d}.jsonl", ("\n".join(lines) + "\n").encode()


def _rejected_lines(storage: Storage, expected: int) -> Iterator[Reject]:
    """The plan's rejects, a batch in memory at a time. Raises HsRayError if there are not as many as it says."""
    found = 0
    if expected or storage.exists(REJECTED):
        with storage.open(REJECTED) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            for batch in parquet.iter_batches(columns=["sample_id", "source", "line", "code", "message"]):
                for row in batch.to_pylist():
                    yield Reject(**row)
                found += batch.num_rows
    if found != expected:
        raise HsRayError(f"{REJECTED}: {found} rejected lines, the plan says {expected}")
