"""S3 for any thread: a few connections, each with an event loop of its own.

One event loop is one core, and checksums, signatures and TLS take it a second for a few hundred megabytes, so
shards are uploaded over several at once. Everything small goes over the first.

Options besides those of `s3fs.S3FileSystem`: `part_bytes` (32 MiB), `max_concurrency` (16: parts in memory at
once, over all uploads of a process), `upload_loops` (4: uploads that run truly in parallel), `retry_seconds` (600),
`scratch_dir` (where shards are made before upload; else the system's folder for temporary files).
"""

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import s3fs
from fsspec.asyn import sync

from hs_ray.storage.s3_requests import READERS, S3Requests

_file_systems: dict[tuple[int, int, str], s3fs.S3FileSystem] = {}
_file_systems_lock = threading.Lock()


def _file_system(number: int, settings: dict[str, Any]) -> s3fs.S3FileSystem:
    """One for each process, number and setting, kept until the process ends.

    Making one takes a third of a second; and one that is collected while another loop runs complains aloud.
    """
    key = (os.getpid(), number, json.dumps(settings, sort_keys=True, default=str))
    with _file_systems_lock:
        if key not in _file_systems:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=f"s3-{number}", daemon=True).start()
            _file_systems[key] = s3fs.S3FileSystem(loop=loop, **settings)
        return _file_systems[key]


class S3Client:
    """One bucket. Picklable; connects on first use in each process, for s3fs does not survive a fork.

    answered: whether the store has said anything yet. It travels along: an actor that starts while the store is unwell
    has to wait for it like the one before it.
    """

    def __init__(self, bucket: str, options: Mapping[str, Any], answered: bool = False):
        self.bucket = bucket
        self.answered = threading.Event()
        if answered:
            self.answered.set()
        self.options = dict(options)
        own = dict(options)
        self.part_bytes = int(own.pop("part_bytes", 32 * 2**20))
        self.retry_seconds = float(own.pop("retry_seconds", 600))
        self.concurrency = int(own.pop("max_concurrency", 16))
        self.upload_loops = int(own.pop("upload_loops", 4))
        own.pop("scratch_dir", None)
        config: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60}
        config["max_pool_connections"] = self.concurrency + READERS
        config |= dict(own.pop("config_kwargs", {}))
        config["retries"] = {"total_max_attempts": 1}  # see S3Requests
        fresh = {"skip_instance_cache": True, "use_listings_cache": False}
        self._settings = own | fresh | {"config_kwargs": config}
        self._lock = threading.Lock()
        self._connections: dict[int, S3Requests] = {}
        self._pid = 0
        self._turn = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bucket, self.options, self.answered.is_set())

    def _connection(self, number: int) -> S3Requests:
        with self._lock:
            if self._pid != os.getpid():
                self._connections, self._pid = {}, os.getpid()
            if number not in self._connections:
                fs, parts = _file_system(number, self._settings), max(1, self.concurrency // self.upload_loops)
                self._connections[number] = S3Requests(
                    fs, self.bucket, self.part_bytes, parts, self.retry_seconds, self.answered
                )
            return self._connections[number]

    def _run(self, method: Any, *args: Any, connection: int = 0, **kwargs: Any) -> Any:
        requests = self._connection(connection)
        return sync(requests.fs.loop, method, requests, *args, **kwargs)

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError."""
        return self._run(S3Requests.get, key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._run(S3Requests.get_range, key, start, length)

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return self._run(S3Requests.get_many, keys)

    def size(self, key: str) -> int:
        """Bytes of an object. Raises FileNotFoundError."""
        return self._run(S3Requests.size, key)

    def put(self, key: str, data: bytes) -> None:
        self._run(S3Requests.call, "put_object", Key=key, Body=data)

    def create(self, key: str, data: bytes) -> bool:
        """False if the key exists with other content."""
        return self._run(S3Requests.create, key, data)

    def delete(self, key: str) -> None:
        self._run(S3Requests.call, "delete_object", Key=key)

    def list_prefix(self, prefix: str) -> list[tuple[str, int, float]]:
        """(key, bytes, unix time) of the objects whose key starts so and has no further `/`; 1,000 a request."""
        return self._run(S3Requests.list_prefix, prefix)

    def upload(self, fd: int, size: int, key: str) -> None:
        """A whole local file; parallel parts; the object is there completely or not at all."""
        with self._lock:
            self._turn += 1
            turn = self._turn % self.upload_loops
        self._run(S3Requests.upload, fd, size, key, connection=1 + turn)

    def abort_uploads(self, prefix: str) -> int:
        """Abort the unfinished uploads under a prefix; returns how many there were."""
        return self._run(S3Requests.abort_uploads, prefix)
