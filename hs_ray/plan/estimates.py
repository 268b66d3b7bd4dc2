"""What a run will take: shown before a GPU is asked for, and the reasons to refuse."""

from collections.abc import Mapping
from typing import Any

from hs_ray.config import parse_bytes
from hs_ray.errors import InputError, OutputError
from hs_ray.plan.build import PlanSummary
from hs_ray.plan.resolved import ResolvedJob
from hs_ray.schema import DONE, Marker, layer_spellings, marker_path, stored_columns
from hs_ray.storage import Storage

SPLIT_ZSTD_RATIO = 0.68  # of the bytes of real states
ROW_BYTES = 250  # names, counts and footer of one row, and a little more for each column
COLUMN_BYTES = 110
TOKEN_BYTES = 5  # input_ids and loss_mask
BAR = 40


def check_rejected(summary: PlanSummary, max_rejected: float) -> None:
    """Raises InputError, with examples, if there is nothing to do, or more of the lines than allowed are unusable."""
    filled = summary.lines - summary.blank
    if summary.samples and summary.rejected <= max_rejected * filled:
        return
    codes = ", ".join(f"{code} {count}" for code, count in summary.rejects_by_code.items())
    examples = "".join(f"\n  {e['source']}, line {e['line']}: {e['code']}: {e['message']}" for e in summary.examples)
    if not summary.samples and not summary.rejected:
        raise InputError(
            f"input.path: {summary.lines} lines, none of them with a sample; give an input that is not empty"
        )
    raise InputError(
        f"input.max_rejected = {max_rejected}: {summary.rejected} of {filled} lines "
        f"({summary.rejected / filled:.2%}) are unusable ({codes}); mend the input, or allow a larger share{examples}"
    )


def measured_rate(storage: Storage, markers: Mapping[int, Marker]) -> float | None:
    """Tokens/s of one engine, from what was committed: over the time in which an engine had units in hand."""
    ends = {info.path: info.mtime for info in storage.list(DONE)}
    spans = [(m.engine, end - m.seconds, end) for m in markers.values() if (end := ends.get(marker_path(m.unit)))]
    busy, last_engine, last_end = 0.0, "", 0.0
    for engine, start, end in sorted(spans):  # several units are in one engine at once: their spans overlap
        last_end = last_end if engine == last_engine else start
        busy += max(0.0, end - max(start, last_end))
        last_engine, last_end = engine, max(end, last_end)
    return sum(marker.tokens for marker in markers.values()) / busy if busy else None


def estimate(
    resolved: ResolvedJob,
    summary: PlanSummary,
    storage: Storage,
    tokens_per_second: float | None,
    replicas: int | None = None,
    device: str | None = None,
    done_tokens: int = 0,
) -> dict[str, Any]:
    """Numbers only. tokens_per_second: of one engine, measured or given; None: the time is not known.

    replicas, device: None where they are not known yet; done_tokens: what a resumed run already has.
    """
    job, spec = resolved.job, resolved.spec
    columns = len(stored_columns(spec.columns, job.output.compression.value))
    ratio = SPLIT_ZSTD_RATIO if job.output.compression.value == "split_zstd" else 1.0
    overhead = summary.tokens * TOKEN_BYTES + summary.rows * (ROW_BYTES + COLUMN_BYTES * columns)
    engines = replicas if replicas is not None else job.engine.replicas
    gpus = 0 if (device or job.engine.device) == "cpu" else None if engines == "auto" else engines * job.engine.tp_size
    rate = tokens_per_second * (1 if engines == "auto" else engines) if tokens_per_second else None
    return summary.to_dict() | {
        "model": resolved.model.name,
        "columns": list(spec.columns),
        "layers": layer_spellings(spec.layers),
        "bytes_per_token": spec.bytes_per_token,
        "output_bytes": round(summary.state_bytes * ratio) + overhead,
        "shards": summary.units,
        "free_bytes": storage.free_bytes(),
        "node_path": job.output.node_path,
        "min_free_bytes": parse_bytes(job.output.min_free_bytes),
        "seconds": (summary.tokens - done_tokens) / rate if rate else None,
        "tokens_per_second": tokens_per_second,
        "engines": engines,
        "gpus": gpus,
        "tp_size": job.engine.tp_size,
        "output": storage.root,
    }


def check_fits(numbers: dict[str, Any], committed_bytes: int = 0) -> None:
    """Raises OutputError if the output will not fit. committed_bytes: of shards that a resumed run already has."""
    free = numbers["free_bytes"]
    missing = numbers["output_bytes"] - committed_bytes + numbers["min_free_bytes"]
    if free is not None and missing > free:
        key = "node_path" if numbers["node_path"] else "path"
        raise OutputError(
            f"output.{key} = {numbers['node_path'] or numbers['output']}: needs {size(missing)}, "
            f"{size(numbers['min_free_bytes'])} of it to spare (output.min_free_bytes); {size(free)} are free; "
            "free some, take fewer layers, or output.compression=split_zstd"
        )


def format_estimate(numbers: dict[str, Any]) -> str:
    """The estimate as people read it."""
    n = numbers
    layers = ", ".join(
        f"{layer['id']} (output of layer {layer['output_of_layer']})" if layer["id"] else "0 (embeddings)"
        for layer in n["layers"]
    )
    final = ", ".join(name for name in n["columns"] if name.startswith("final")) or "none"
    unbounded = "each node's own disk" if n["node_path"] else "no bound (S3)"
    free = unbounded if n["free_bytes"] is None else f"{size(n['free_bytes'])} free"
    learned = n["learned_tokens"] / max(n["tokens"], 1)
    lines = [
        f"model      {n['model']}",
        f"layers     {layers}; final: {final}",
        f"lines      {n['lines']:,} = {n['samples']:,} samples + {n['rejected']:,} rejected + {n['blank']:,} blank",
        *[f"           rejected: {code} {count:,}" for code, count in n["rejects_by_code"].items()],
        f"tokens     {n['tokens']:,} ({learned:.0%} learned), longest {n['longest_tokens']:,}, "
        f"{n['truncated']:,} samples cut",
        *_histogram(n["length_histogram"]),
        f"output     {size(n['output_bytes'])} in {n['shards']:,} shards: {n['bytes_per_token']:,} bytes of states a "
        f"token; {free}",
        f"time       {_time(n)}",
        f"GPUs       {_gpus(n)}",
    ]
    return "\n".join(lines)


def _time(n: dict[str, Any]) -> str:
    if n["seconds"] is None:
        return "not known before some of it is done; or give cluster.tokens_per_second"
    engines = "one engine" if n["engines"] in ("auto", 1) else f"{n['engines']} engines"
    return f"{duration(n['seconds'])} at {n['tokens_per_second']:,.0f} tokens/s an engine, {engines}"


def _gpus(n: dict[str, Any]) -> str:
    if n["gpus"] is None:
        return f"{n['tp_size']} an engine, as many engines as fit"
    return f"{n['gpus']} ({n['engines']} x {n['tp_size']})" if n["gpus"] else "none"


def _histogram(bins: list[list[int]]) -> list[str]:
    most = max((count for _, count in bins), default=1)
    return [
        f"           <= {top:>7,} tokens {count:>10,} {'#' * max(1, round(BAR * count / most))}" for top, count in bins
    ]


def size(count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
