"""What says which shards count: markers, the manifest and the folder of shards, against each other and the plan."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from hs_ray.errors import ShardError
from hs_ray.reader.output import OUR_SHARD
from hs_ray.reader.run import load_json
from hs_ray.schema import DONE, FORMAT_VERSION, MANIFEST, SHARDS, Marker, marker_path, unit_name
from hs_ray.storage import PerNodeStorage, Storage
from hs_ray.verify.report import MAX_SHOWN, Report


def load_manifest(storage: Storage, report: Report) -> dict[str, Any] | None:
    """manifest.json with `counts` a dict and `shards` a list of dicts that have a `unit`; None where there is none.

    What is otherwise in it is a problem and is left out: there was a manifest, so everything else is still checked.
    """
    try:
        manifest = load_json(storage, MANIFEST)
    except ShardError as error:
        report.add("manifest", MANIFEST, str(error))
        manifest = {"complete": True, "counts": {}, "shards": []}
    if not manifest:
        return None
    for name, kind in (("counts", dict), ("shards", list)):
        if not isinstance(manifest.get(name), kind):
            report.add("manifest", MANIFEST, f"{name} is {manifest.get(name)!r:.80}, not a JSON {kind.__name__}")
            manifest[name] = kind()
    usable = [entry for entry in manifest["shards"] if isinstance(entry, dict) and type(entry.get("unit")) is int]
    if without := len(manifest["shards"]) - len(usable):
        report.add("manifest", MANIFEST, f"{without} of its shards have no unit")
    return manifest | {"shards": usable}


def load_markers(storage: Storage, units: int, report: Report) -> dict[int, Marker]:
    """Every marker that can be read and whose unit is in the plan, by unit. units: how many the plan has."""
    files = [info.path for info in storage.list(DONE)]
    markers = {}
    for path, data in zip(files, storage.read_many(files), strict=True):
        try:
            marker = Marker.from_json(data)
        except ValueError as error:
            report.add("marker", path, f"cannot be read ({error})")
            continue
        if path != marker_path(marker.unit):
            report.add("marker", path, f"is a marker of {unit_name(marker.unit)}")
        elif not 0 <= marker.unit < units:
            report.add("marker", path, f"the plan has no such unit, it has {units}")
        else:
            _check_marker(marker, report)
            markers[marker.unit] = marker
    return dict(sorted(markers.items()))


def _check_marker(marker: Marker, report: Report) -> None:
    path = marker_path(marker.unit)
    if marker.shard is None:
        counted = {name: getattr(marker, name) for name in ("samples", "rows", "tokens", "bytes")}
        if any(counted.values()):
            report.add("marker", path, f"names no shard and yet counts {counted}")
        return
    folder, _, name = marker.shard.rpartition("/")
    if folder != SHARDS or not OUR_SHARD.fullmatch(name) or not name.startswith(f"{unit_name(marker.unit)}-"):
        report.add("marker", path, f"names {marker.shard}, which is no shard of {unit_name(marker.unit)}")


def check_manifest(manifest: dict[str, Any], markers: dict[int, Marker], run: dict[str, Any], report: Report) -> None:
    """A complete run's manifest against run.json and the markers that it was made from."""
    missing = (unit for unit in range(run["plan"]["units"]) if unit not in markers)  # run.json may say any number
    for unit in islice(missing, MAX_SHOWN):
        report.add("marker", marker_path(unit), f"missing, though {MANIFEST} says that the run is complete")
    _check_head(manifest, run, report)
    entries = {entry["unit"]: entry for entry in manifest["shards"]}
    for unit, number in Counter(entry["unit"] for entry in manifest["shards"]).items():
        if number > 1:
            report.add("manifest", MANIFEST, f"{unit_name(unit)} is listed {number} times")
    for unit in sorted(entries.keys() | {unit for unit, marker in markers.items() if marker.shard}):
        if unit not in entries or unit not in markers:
            alone = "the manifest" if unit in entries else "the markers"
            report.add("manifest", MANIFEST, f"{unit_name(unit)} is in {alone} alone")
            continue
        _check_entry({"node": ""} | entries[unit], markers[unit], report)


def _check_head(manifest: dict[str, Any], run: dict[str, Any], report: Report) -> None:
    """What the manifest says about the run; it need not say it."""
    model = run["model"]
    wanted = {"format_version": FORMAT_VERSION, "fingerprint": run["fingerprint"], "revision": model.get("revision")}
    wanted |= {name: run["spec"][name] for name in ("num_hidden_layers", "hidden_size", "layers", "final")}
    for name, value in wanted.items():
        if manifest.get(name, value) != value:
            report.add("manifest", MANIFEST, f"{name} is {manifest[name]!r:.200}, the run's is {value!r:.200}")
    if manifest.get("model", model["name"]) not in (model["name"], model.get("path")):
        report.add("manifest", MANIFEST, f"model is {manifest['model']!r:.200}, the run's is {model['name']!r}")


def _check_entry(found: dict[str, Any], marker: Marker, report: Report) -> None:
    wanted = {name: getattr(marker, name) for name in ("bytes", "sha256", "samples", "rows", "tokens", "node")}
    for name, value in {"path": marker.shard, **wanted}.items():
        if found.get(name) != value or type(found[name]) is not type(value):  # 4.0 is no number of samples
            detail = f"{unit_name(marker.unit)}: {name} is {found.get(name)!r}, its marker says {value!r}"
            report.add("manifest", MANIFEST, detail)


def check_files(storage: Storage, markers: dict[int, Marker], finished: bool, report: Report) -> None:
    """The folder of shards holds what markers name, and nothing else."""
    present = {info.path: info.size for info in storage.list(SHARDS)}
    named = {marker.shard for marker in markers.values()}
    elsewhere = [m for m in markers.values() if m.shard not in present and not storage.holds(m.node)]
    for marker in elsewhere:  # on another node's own disk: verified there
        report.count(f"shards on node {marker.node}")
    copied = any(marker.shard in present and not storage.holds(marker.node) for marker in markers.values())
    if elsewhere and (copied or not present):
        why = "though those of some nodes were copied here" if copied else "and none is seen from here: verify there"
        report.add("file", SHARDS, f"{len(elsewhere)} shards of other nodes are not here, {why}")
    # A node that was away may hold shards of earlier attempts.
    finished = finished and not isinstance(storage, PerNodeStorage)
    for path in present:
        if path not in named and (finished or not OUR_SHARD.fullmatch(path.rpartition("/")[2])):
            report.add("foreign", path, "no marker names this file")
    for path in _no_files(storage):
        report.add("foreign", path, "a folder or a link: other readers of shards/ take for shards what is behind it")
    for unit, marker in markers.items():
        if marker.shard is not None and marker.shard not in present and storage.holds(marker.node):
            report.add("file", marker.shard, f"missing, {marker_path(unit)} names it")


def _no_files(storage: Storage) -> list[str]:
    """What is in `shards/` and no file of its own: pyarrow and DuckDB read what is in folders and behind links, too.

    A disk only; a store has no folders.
    """
    disks = [storage.shared, storage.visible] if isinstance(storage, PerNodeStorage) else [storage]
    found = set()
    for disk in disks:
        top = disk.local_path(SHARDS) if disk else None
        entries = Path(top).iterdir() if top and Path(top).is_dir() else ()
        found |= {f"{SHARDS}/{entry.name}" for entry in entries if entry.is_symlink() or not entry.is_file()}
    return sorted(found)
