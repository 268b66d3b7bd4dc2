"""The driver's copy of the markers: `_run/index/*.jsonl`, one marker a line.

Markers are one small file a unit. A resume must not read them one by one (10,000 requests on S3), so the driver
keeps an index of those it was told of, only ever a copy. Each of its lines has a checksum: what is believed of one
may remove a unit, and ends in the manifest.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable

from hs_ray.schema import Marker
from hs_ray.storage import FULL, FileInfo, Storage

INDEX = "_run/index"
INDEX_EVERY = 1000  # markers in one file of the index


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
    return parse_marker(text) if whole else None


def indexed(storage: Storage, done: dict[int, FileInfo]) -> dict[int, Marker]:
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


def parse_marker(content: bytes, unit: int | None = None) -> Marker | None:
    """The marker in a text; None for anything else, a marker of another `unit` among it."""
    try:
        marker = Marker.from_json(content)
    except ValueError:
        return None
    return marker if unit in (None, marker.unit) else None
