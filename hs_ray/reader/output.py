"""An output folder as its readers see it: what was run, and which shards count.

A shard counts when a marker names it. A complete run says so in `manifest.json`; what an unfinished one has
committed is read only when asked for (`incomplete=True`).
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hs_ray.errors import OutputError, ShardError
from hs_ray.schema import DONE, MANIFEST, RUN_JSON, SHARDS, CaptureSpec, Marker, marker_path, unit_name
from hs_ray.storage import FileInfo, PerNodeStorage, Storage

OUR_SHARD = re.compile(r"unit-\d{6,}-[\w.-]+\.parquet")


@dataclass(frozen=True)
class ShardEntry:
    """A committed shard. `samples` counts a sample once however many `rows` it became."""

    unit: int
    path: str
    samples: int
    rows: int
    tokens: int
    bytes: int
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


def load_json(storage: Storage, path: str) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no file. Raises ShardError for anything else in it."""
    if not storage.exists(path):
        return None
    try:
        content = json.loads(storage.read_bytes(path))
    except ValueError as error:
        raise ShardError(f"{storage.root}/{path}: damaged, not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ShardError(f"{storage.root}/{path}: damaged, not a JSON object")
    return content


def load_run(storage: Storage) -> dict[str, Any]:
    """`_run/run.json`. Raises OutputError if this is no output of hs_ray."""
    run = load_json(storage, RUN_JSON)
    if run is None:
        raise OutputError(
            f"output.path = {storage.root}: no {RUN_JSON} there, so this is not an output of hs_ray; check the path"
        )
    return run


def find_shards(storage: Storage, run: Mapping[str, Any]) -> Storage:
    """The storage that sees this node's shards too, where the run left them on each node's own disk."""
    node_path = run["config"]["output"].get("node_path")
    if not node_path or isinstance(storage, PerNodeStorage):
        return storage
    return PerNodeStorage(storage, node_path)


def run_spec(run: Mapping[str, Any]) -> CaptureSpec:
    """What a run captured, out of run.json or out of a shard's metadata."""
    spec = run.get("spec", run)
    layers = tuple(layer["id"] for layer in spec["layers"])
    return CaptureSpec(layers, spec["final"], spec["num_hidden_layers"], spec["hidden_size"])


def load_markers(storage: Storage) -> dict[int, Marker]:
    """Every marker by unit, believed as it stands. Raises ShardError that names one that cannot be read."""
    files = [info for info in storage.list(DONE) if info.path.endswith(".json")]
    markers = {}
    for info, data in zip(files, storage.read_many([info.path for info in files]), strict=True):
        try:
            marker = Marker.from_json(data)
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{storage.root}/{info.path}: damaged marker ({error})") from None
        if info.path != marker_path(marker.unit):
            raise ShardError(f"{storage.root}/{info.path}: a marker of {unit_name(marker.unit)} under another name")
        markers[marker.unit] = marker
    return dict(sorted(markers.items()))


def open_output(storage: Storage, incomplete: bool = False) -> Output:
    """Read what says which shards count, and check names and sizes against one listing.

    Raises OutputError where there is no run, or an unfinished one without `incomplete`; ShardError, naming the
    file, for a missing marker, a shard that is missing or of another size, or a foreign file among the shards.
    """
    run = load_run(storage)
    storage = find_shards(storage, run)
    manifest = load_json(storage, MANIFEST) or {}
    complete = bool(manifest.get("complete"))
    if not complete and not incomplete:
        raise OutputError(
            f"output.path = {storage.root}: the run is not complete ({MANIFEST} "
            f"{'says so' if manifest else 'is missing'}); finish it with the same command, or ask for what is "
            f"committed so far with incomplete=true"
        )
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


def _from_manifest(storage: Storage, manifest: dict[str, Any]) -> list[ShardEntry]:
    present = {info.path for info in storage.list(DONE)}
    for unit in range(manifest["counts"]["units"]):
        if marker_path(unit) not in present:
            raise ShardError(
                f"{storage.root}/{marker_path(unit)}: missing, though {MANIFEST} says that the run is complete"
            )
    names = ShardEntry.__dataclass_fields__
    return [ShardEntry(**{name: entry[name] for name in names if name in entry}) for entry in manifest["shards"]]


def _from_markers(storage: Storage) -> list[ShardEntry]:
    return [
        ShardEntry(m.unit, m.shard, m.samples, m.rows, m.tokens, m.bytes, m.node)
        for m in load_markers(storage).values()
        if m.shard is not None
    ]


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
