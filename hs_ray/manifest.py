"""Markers -> manifest: what is committed, what is left over, and whether every line of the input is accounted for.

Markers are one small file a unit. A resume must not read them one by one (10,000 requests on S3), so the driver
also keeps an index of those it was told of: `_run/index/*.jsonl`, one marker a line, only ever a copy. A listing
of `_run/done` says which markers exist; the index gives their content where it is surely the same. Each of its lines
has a checksum: what is believed of one may remove a unit, and ends in the manifest.
"""

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from hs_ray.errors import HsRayError, OutputError
from hs_ray.lease import check_epoch
from hs_ray.schema import (
    ATTEMPTS,
    DONE,
    FINAL_NORM,
    FORMAT_VERSION,
    MANIFEST,
    REJECTED,
    REJECTS,
    SHARDS,
    TMP,
    Marker,
    Reject,
    marker_path,
)
from hs_ray.storage import FULL, FileInfo, Storage

log = logging.getLogger(__name__)
Check = Callable[[Sequence[Marker]], None]

INDEX = "_run/index"
INDEX_EVERY = 1000  # markers in one file of the index
REJECTS_PER_FILE = 100_000
OWNED = re.compile(r"unit-(\d{6,})-(\d{4,})-[0-9a-f]+\.(parquet|json)$")  # unit, epoch


# --- markers ---


class MarkerIndex:
    """The driver's copy of the markers that its actors reported, so that the next start need not read each."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._lines: list[str] = []

    def add(self, marker: Marker) -> None:
        self._lines.append(_index_line(marker))
        if len(self._lines) >= INDEX_EVERY:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last time; call it every few seconds. A full disk has it wait for the next."""
        if self._lines:
            try:
                self._storage.write(f"{INDEX}/{secrets.token_hex(8)}.jsonl", "\n".join(self._lines).encode())
            except OSError as error:
                if error.errno not in FULL:
                    raise
                return
            self._lines = []

    def replace(self, markers: Iterable[Marker]) -> None:
        """Make the index these markers and nothing else: at a start, so that its files do not add up."""
        old = [info.path for info in self._storage.list(INDEX)]
        for marker in markers:
            self.add(marker)
        self.flush()
        for path in old:
            self._storage.remove(path)


def _index_line(marker: Marker) -> str:
    text = json.dumps(json.loads(marker.to_json()), separators=(",", ":"))
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","marker":{text}}}'


def _from_index_line(line: bytes) -> Marker | None:
    """None where the checksum does not fit, or is missing as in lines of earlier releases: the marker is read."""
    head, _, text = line.removesuffix(b"}").partition(b',"marker":')
    whole = head == f'{{"sha256":"{hashlib.sha256(text).hexdigest()}"'.encode()
    return _parse(text) if whole else None


def _indexed(storage: Storage, done: dict[int, FileInfo]) -> dict[int, Marker]:
    """Markers that the index surely has right: made before the index's file, and named by it once."""
    files = storage.list(INDEX)
    found: dict[int, Marker] = {}
    doubtful: set[int] = set()
    for info, content in zip(files, storage.read_many([info.path for info in files]), strict=True):
        for line in content.splitlines():
            marker = _from_index_line(line)
            if marker is None:
                continue  # only a copy is damaged: the marker itself is read
            there = done.get(marker.unit)
            if there is None or there.mtime >= info.mtime or found.setdefault(marker.unit, marker) != marker:
                doubtful.add(marker.unit)
    return {unit: marker for unit, marker in found.items() if unit not in doubtful}


def list_markers(storage: Storage) -> dict[int, Marker | None]:
    """Every unit that has a marker, with its content; None where that is no marker of ours.

    One request for a thousand markers or so, as long as the index is there; one each where it is not.
    """
    done: dict[int, FileInfo] = {}
    for info in storage.list(DONE):
        stem = Path(info.path).stem
        if re.fullmatch(r"unit-\d{6,}", stem):
            done[int(stem.removeprefix("unit-"))] = info
    markers: dict[int, Marker | None] = dict(_indexed(storage, done))
    unknown = [unit for unit in done if unit not in markers]
    for unit, content in zip(unknown, storage.read_many([done[unit].path for unit in unknown]), strict=True):
        markers[unit] = _parse(content, unit)
    return dict(sorted(markers.items()))


def _parse(content: bytes, unit: int | None = None) -> Marker | None:
    """The marker in a text; None for anything else, a marker of another `unit` among it."""
    try:
        marker = Marker.from_json(content)
    except ValueError:
        return None
    return marker if unit in (None, marker.unit) else None


def distrust(marker: Marker | None, fingerprint: str, sizes: dict[str, int]) -> str | None:
    """Why a marker does not count, or None. sizes: path -> bytes of what is in `shards/`."""
    if marker is None:
        return "is not a marker of this format"
    if marker.fingerprint != fingerprint:
        return f"was made by another configuration (fingerprint {marker.fingerprint[:12]})"
    if marker.shard is None:
        return None
    if marker.shard not in sizes:
        return f"names {marker.shard}, which is missing"
    if sizes[marker.shard] != marker.bytes:
        return f"names {marker.shard}, which has {sizes[marker.shard]} bytes, not {marker.bytes}"
    return None


def read_markers(storage: Storage, fingerprint: str) -> dict[int, Marker]:
    """Unit -> marker, in order, of what is committed. A marker that is not trusted is logged and left out; the
    driver removes it with `drop_untrusted` before the unit runs again."""
    return _judge(storage, fingerprint)[0]


def drop_untrusted(storage: Storage, epoch: int, fingerprint: str, check: Check | None = None) -> dict[int, Marker]:
    """Like `read_markers`, and markers that are not trusted are removed so that their units can commit again.

    check: is given these markers first, and may raise. Raises LostLeaseError if a newer driver holds the output.
    """
    check_epoch(storage, epoch)
    trusted, untrusted = _judge(storage, fingerprint)
    if check is not None:
        check([marker for marker in untrusted.values() if marker is not None])
    if untrusted:
        storage.remove(MANIFEST)  # first: it names shards that do not count
    for unit in untrusted:
        storage.remove(marker_path(unit))
    return trusted


def _judge(storage: Storage, fingerprint: str) -> tuple[dict[int, Marker], dict[int, Marker | None]]:
    trusted: dict[int, Marker] = {}
    untrusted: dict[int, Marker | None] = {}
    markers = list_markers(storage)
    # After the markers: a shard is there before its marker, so none that a listed marker names can be overlooked.
    sizes = {info.path: info.size for info in storage.list(SHARDS)}
    for unit, marker in markers.items():
        if marker is not None and not storage.holds(marker.node):
            sizes.setdefault(str(marker.shard), marker.bytes)  # on another node's own disk: believed
        reason = distrust(marker, fingerprint, sizes)
        if marker is not None and reason is None:
            trusted[unit] = marker
        else:
            log.warning("%s does not count: it %s", marker_path(unit), reason)
            untrusted[unit] = marker
    return trusted, untrusted


# --- what dead attempts left ---


def clean_leftovers(storage: Storage, epoch: int, markers: dict[int, Marker]) -> int:
    """Remove what attempts left that never committed: shards that no marker names, temporary files, notes of
    attempts, unfinished uploads. Returns how many.

    Call it while no attempt of this epoch runs: at the start and before the manifest. What a newer epoch made is
    left alone. Raises LostLeaseError if there is one.
    """
    check_epoch(storage, epoch)
    removed = storage.abort_incomplete_uploads()
    for info in [*storage.list(SHARDS), *storage.list(ATTEMPTS), *storage.list(TMP)]:
        if _is_leftover(storage, info.path, epoch, markers):
            storage.remove(info.path)
            removed += 1
    return removed


def _is_leftover(storage: Storage, path: str, epoch: int, markers: dict[int, Marker]) -> bool:
    folder, _, name = path.rpartition("/")
    owned = OWNED.fullmatch(name)
    if owned is None:
        if folder == SHARDS:
            log.warning("%s: not made by hs_ray; readers of the folder will trip over it", path)
        return folder == TMP  # probes and half-written small files; an index or a heartbeat is written again
    unit, its_epoch = int(owned[1]), int(owned[2])
    if its_epoch > epoch:
        return False
    if folder != SHARDS:
        return True
    if unit in markers and markers[unit].shard == path:
        return False
    # A zombie may have committed since `markers` was read: ask again before removing a shard.
    try:
        marker = _parse(storage.read_bytes(marker_path(unit)), unit)
    except FileNotFoundError:
        return True
    return marker is None or marker.shard != path


# --- the manifest ---


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
            for batch in pq.ParquetFile(file).iter_batches(columns=["sample_id", "source", "line", "code", "message"]):
                for row in batch.to_pylist():
                    yield Reject(**row)
                found += batch.num_rows
    if found != expected:
        raise HsRayError(f"{REJECTED}: {found} rejected lines, the plan says {expected}")
