"""Which units are committed: a listing of `_run/done` says which markers exist, the index what most of them hold."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hs_ray.lease import check_epoch
from hs_ray.manifest.index import indexed, parse_marker
from hs_ray.schema import DONE, MANIFEST, SHARDS, Marker, marker_path
from hs_ray.storage import FileInfo, Storage

log = logging.getLogger(__name__)
Check = Callable[[Sequence[Marker]], None]


def list_markers(storage: Storage) -> dict[int, Marker | None]:
    """Every unit that has a marker, with its content; None where that is no marker of ours.

    One request for a thousand markers or so, as long as the index is there; one each where it is not.
    """
    done: dict[int, FileInfo] = {}
    for info in storage.list(DONE):
        stem = Path(info.path).stem
        if re.fullmatch(r"unit-\d{6,}", stem):
            done[int(stem.removeprefix("unit-"))] = info
    markers: dict[int, Marker | None] = dict(indexed(storage, done))
    unknown = [unit for unit in done if unit not in markers]
    for unit, content in zip(unknown, storage.read_many([done[unit].path for unit in unknown]), strict=True):
        markers[unit] = parse_marker(content, unit)
    return dict(sorted(markers.items()))


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
