"""An output folder as its readers see it: what was run, and which shards count.

A shard counts when a marker names it. A complete run says so in `manifest.json`; what an unfinished one has
committed is read only when asked for (`incomplete=True`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from hs_ray.errors import OutputError, ShardError
from hs_ray.reader.run import find_shards, load_json, load_run, run_spec, value_at
from hs_ray.schema import (
    DONE,
    MANIFEST,
    SHARDS,
    CaptureSpec,
    Marker,
    marker_path,
    shard_path,
    unit_name,
)
from hs_ray.storage import FileInfo, PerNodeStorage, Storage

OUR_SHARD = re.compile(r"unit-\d{6,}-[\w.-]+\.parquet")
MARKERS_AT_ONCE = 256  # in memory: they have checksums of every sample


@dataclass(frozen=True)
class ShardEntry:
    """A committed shard. `samples` counts a sample once however many `rows` it became."""

    unit: int
    path: str
    samples: int
    rows: int
    tokens: int
    bytes: int
    sha256: str
    node: str = ""  # whose own disk it is on; empty where all nodes see it


@dataclass(frozen=True)
class Output:
    """An opened output. `shards` are in unit order, which is the order of the input.

    Where shards are on each node's own disk (`output.node_path`) they are this node's; `elsewhere` has the others'
    number by node.
    """

    storage: Storage
    run: dict[str, Any]
    spec: CaptureSpec
    fingerprint: str
    compression: str
    complete: bool
    shards: tuple[ShardEntry, ...]
    elsewhere: dict[str, int]

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


def load_markers(storage: Storage) -> dict[int, Marker]:
    """Every marker by unit, believed as it stands. Raises ShardError that names one that cannot be read."""
    return dict(sorted((marker.unit, marker) for marker in _each_marker(storage)))


def _each_marker(storage: Storage) -> Iterator[Marker]:
    """All markers by path, a few of them in memory. Raises like load_markers."""
    paths = [info.path for info in storage.list(DONE) if info.path.endswith(".json")]
    for at in range(0, len(paths), MARKERS_AT_ONCE):
        some = paths[at : at + MARKERS_AT_ONCE]
        for path, data in zip(some, storage.read_many(some), strict=True):
            yield _marker(storage, path, data)


def _marker(storage: Storage, path: str, data: bytes) -> Marker:
    try:
        marker = Marker.from_json(data)
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{storage.root}/{path}: damaged marker ({error})") from None
    if path != marker_path(marker.unit):
        raise ShardError(f"{storage.root}/{path}: a marker of {unit_name(marker.unit)} under another name")
    return marker


def open_output(storage: Storage, incomplete: bool = False) -> Output:
    """Read what says which shards count, and check names and sizes against one listing.

    Raises OutputError where there is no run, or an unfinished one without `incomplete`; ShardError, naming the
    file, for a missing marker, a shard that is missing or of another size, or a foreign file among the shards.
    """
    run = load_run(storage)
    storage = find_shards(storage, run)
    manifest = load_json(storage, MANIFEST) or {}
    if not incomplete:
        check_complete(storage, manifest, "incomplete=True")
    complete = bool(manifest.get("complete"))
    named = _from_manifest(storage, manifest) if complete else _from_markers(storage)
    present = {info.path: info for info in storage.list(SHARDS)}
    entries = [entry for entry in named if entry.path in present or storage.holds(entry.node)]
    elsewhere = Counter(entry.node for entry in named if entry.path not in present and not storage.holds(entry.node))
    if elsewhere and not entries:
        raise OutputError(
            f"output.path = {storage.root}: its shards are on the nodes {', '.join(sorted(elsewhere))}, none on this "
            f"one; read them there, or copy every node's {_on_a_node(storage)}/{SHARDS}/ into {storage.root}/{SHARDS}/"
        )
    if elsewhere and any(not storage.holds(entry.node) for entry in entries):
        raise OutputError(
            f"output.path = {storage.root}: the shards of some nodes were copied into {SHARDS}/, those of "
            f"{', '.join(sorted(elsewhere))} were not; copy every node's {_on_a_node(storage)}/{SHARDS}/"
        )
    _check_files(storage, present, entries, complete)
    return Output(
        storage=storage,
        run=run,
        spec=run_spec(run),
        fingerprint=run["fingerprint"],
        compression=run["config"]["output"]["compression"],
        complete=complete,
        shards=tuple(sorted(entries, key=lambda entry: entry.unit)),
        elsewhere=dict(elsewhere),
    )


def check_complete(storage: Storage, manifest: Mapping[str, Any] | None, flag: str) -> None:
    """Raises OutputError unless this is the manifest of a complete run. flag: what the user may give to go without."""
    if not (manifest and manifest.get("complete")):
        raise OutputError(
            f"output.path = {storage.root}: the run is not complete ({MANIFEST} "
            f"{'says so' if manifest else 'is missing'}); finish it with the same command, or ask for what is "
            f"committed so far with {flag}"
        )


def _from_manifest(storage: Storage, manifest: dict[str, Any]) -> list[ShardEntry]:
    """The shards of a complete run: each unit's at most once, and together the samples that were committed."""
    units, committed, listed = (value_at(manifest, name) for name in ("counts.units", "counts.committed", "shards"))
    if type(units) is not int or type(committed) is not int or not isinstance(listed, list):
        raise _damaged(storage, "counts.units and counts.committed must be whole numbers, shards a list")
    entries = [_entry(storage, number, found) for number, found in enumerate(listed)]
    _check_once(storage, entries, units)
    found = sum(entry.samples for entry in entries)
    if found != committed:
        raise _damaged(storage, f"its shards have {found} samples, counts.committed is {committed}")
    present = {info.path for info in storage.list(DONE)}
    for unit in range(units):
        if marker_path(unit) not in present:
            raise ShardError(
                f"{storage.root}/{marker_path(unit)}: missing, though {MANIFEST} says that the run is complete"
            )
    return entries


def _damaged(storage: Storage, what: str) -> ShardError:
    return ShardError(
        f"{storage.root}/{MANIFEST}: damaged, {what}; remove it and run the same extraction again, which makes it anew"
    )


def _entry(storage: Storage, number: int, found: Any) -> ShardEntry:
    """One of the manifest's shards; what else it says there is not for readers."""
    if not isinstance(found, dict):
        raise _damaged(storage, f"shards[{number}] is {found!r:.80}")
    for entry in fields(ShardEntry):
        value = found.get(entry.name, entry.default)
        if value is MISSING or type(value) is not entry.type or (type(value) is int and value < 0):
            told = "missing" if value is MISSING else f"{value!r:.80}"
            raise _damaged(storage, f"shards[{number}].{entry.name} is {told}")
    return ShardEntry(**{entry.name: found[entry.name] for entry in fields(ShardEntry) if entry.name in found})


def _check_once(storage: Storage, entries: Sequence[ShardEntry], units: int) -> None:
    """A shard that is named twice would give its samples twice."""
    for unit, times in Counter(entry.unit for entry in entries).items():
        if times > 1:
            raise _damaged(storage, f"it names {unit_name(unit)} {times} times")
        if unit >= units:
            raise _damaged(storage, f"it names {unit_name(unit)}, counts.units is {units}")
    for entry in entries:
        if not entry.path.startswith(shard_path(entry.unit, "").removesuffix(".parquet")):
            raise _damaged(storage, f"it names {entry.path} as the shard of {unit_name(entry.unit)}")


def _from_markers(storage: Storage) -> list[ShardEntry]:
    entries = []
    for m in _each_marker(storage):
        _check_numbers(storage, m)
        if m.shard is not None:
            entries.append(ShardEntry(m.unit, m.shard, m.samples, m.rows, m.tokens, m.bytes, m.sha256, m.node))
    return entries


def _check_numbers(storage: Storage, marker: Marker) -> None:
    """No manifest's sum stands over these: a wrong `samples` would lose samples, its own or another unit's."""
    counts = (marker.samples, marker.rows, marker.tokens, marker.bytes)
    told = ", ".join(f"{n} {name}" for n, name in zip(counts, ("samples", "rows", "tokens", "bytes"), strict=True))
    wrong = None
    if marker.shard is None:
        wrong = f"names no shard for {told}" if any(counts) else None
    elif not marker.shard.startswith(shard_path(marker.unit, "").removesuffix(".parquet")):
        wrong = f"names {marker.shard} as the shard of {unit_name(marker.unit)}"
    # A sample has a row at least, a row a token, a token its id: and `bytes` is compared with the file.
    elif not 0 < marker.samples <= marker.rows <= marker.tokens <= marker.bytes:
        wrong = f"says {told}"
    if wrong is None and marker.checksums and len(marker.checksums) != marker.samples:  # older ones may have none
        wrong = f"says {marker.samples} samples and has checksums of {len(marker.checksums)}"
    if wrong is not None:
        raise ShardError(
            f"{storage.root}/{marker_path(marker.unit)}: damaged, it {wrong}; remove it and run the same extraction "
            f"again, which computes its unit anew"
        )


def _on_a_node(storage: Storage) -> str:
    return f"{storage.node_path}/{storage.folder}" if isinstance(storage, PerNodeStorage) else storage.root


def _check_files(storage: Storage, present: Mapping[str, FileInfo], entries: list[ShardEntry], complete: bool) -> None:
    named = {entry.path for entry in entries}
    # An unfinished run may hold shards that no marker names yet, a node that was away those of earlier attempts.
    complete = complete and not isinstance(storage, PerNodeStorage)
    for path in present:
        if path not in named and (complete or not OUR_SHARD.fullmatch(path.rpartition("/")[2])):
            raise ShardError(f"{storage.root}/{path}: a foreign file, no marker names it; move it out of {SHARDS}/")
    for entry in entries:
        info = present.get(entry.path)
        if info is None:
            where = f" on node {entry.node}" if entry.node else ""
            raise ShardError(
                f"{storage.root}/{entry.path}: missing, the marker of {unit_name(entry.unit)} names it{where}"
            )
        if info.size != entry.bytes:
            raise ShardError(
                f"{storage.root}/{entry.path}: damaged, {info.size} bytes where {entry.bytes} were committed"
            )
