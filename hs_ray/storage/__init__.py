"""Outputs on a local disk or on S3, behind one interface whose writes are whole or not there."""

from collections.abc import Mapping
from typing import Any

from hs_ray.errors import OutputError
from hs_ray.storage.base import FileInfo, Storage
from hs_ray.storage.local import LocalStorage
from hs_ray.storage.outage import is_outage, raise_outage
from hs_ray.storage.per_node import PerNodeStorage
from hs_ray.storage.room import FULL, OnWait, wait_while, when_there_is_room
from hs_ray.storage.scratch import GrowingHash, Scratch

__all__ = [
    "FULL",
    "FileInfo",
    "GrowingHash",
    "LocalStorage",
    "OnWait",
    "PerNodeStorage",
    "Scratch",
    "Storage",
    "is_outage",
    "open_storage",
    "raise_outage",
    "wait_while",
    "when_there_is_room",
]


def open_storage(path: str, options: Mapping[str, Any] | None = None) -> Storage:
    """The output at a local folder or `s3://bucket/prefix`. Neither looks nor connects yet.

    options: for S3, see `hs_ray.storage.s3_client`. Raises OutputError for another scheme or a missing bucket.
    """
    scheme, separator, rest = path.partition("://")
    if not separator:
        return LocalStorage(path)
    if scheme == "file":
        return LocalStorage(rest)
    if scheme not in ("s3", "s3a") or not rest.split("/")[0]:
        raise OutputError(f"output.path = {path}: a local folder, or s3://bucket/prefix")
    # aiobotocore takes a second to import: only where it is used.
    from hs_ray.storage.s3 import S3Storage

    return S3Storage(path, options or {})
