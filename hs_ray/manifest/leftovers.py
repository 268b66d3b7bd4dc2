"""What attempts left that never committed, and its removal."""

import logging
import re

from hs_ray.lease import check_epoch
from hs_ray.manifest.index import parse_marker
from hs_ray.schema import ATTEMPTS, SHARDS, TMP, Marker, marker_path
from hs_ray.storage import Storage

log = logging.getLogger(__name__)

OWNED = re.compile(r"unit-(\d{6,})-(\d{4,})-[0-9a-f]+\.(parquet|json)$")  # unit, epoch


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
        marker = parse_marker(storage.read_bytes(marker_path(unit)), unit)
    except FileNotFoundError:
        return True
    return marker is None or marker.shard != path
