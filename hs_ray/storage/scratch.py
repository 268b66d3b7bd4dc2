"""A local file that a shard is made in: its room on the disk, and its sha256 while it grows."""

import ctypes
import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hs_ray.storage.room import FULL

RESERVE_STEP = 4 * 2**20  # taken beyond what is asked for, so that small rows do not ask each time

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_FALLOC_FL_KEEP_SIZE = 1


class Scratch:
    """A file being made, not part of the output until it is published.

    path: for pyarrow, which writes fastest to a name of the operating system; fd: the same file.
    disk: what to call the disk it is on.
    """

    def __init__(self, path: str, fd: int, linked: bool, disk: str):
        self.path, self.fd, self.disk, self._linked = path, fd, disk, linked
        self._reserved = 0  # bytes of the file that surely have room

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def reserve(self, need: int, min_free: int) -> str | None:
        """Take the blocks for the next `need` bytes; the reason if the disk would have less than `min_free` left.

        A disk that fills up then refuses here, where waiting loses nothing, and not in the middle of a row
        group. `trim` gives back what was not used.
        """
        size = self.size
        if size + need <= self._reserved:
            return None
        stats = os.fstatvfs(self.fd)
        free = stats.f_bavail * stats.f_frsize
        if free >= need + RESERVE_STEP + min_free:
            need += RESERVE_STEP
        if free < need + min_free:
            return f"{self.disk}: {free} bytes free, needs {need} and {min_free} to spare (output.min_free_bytes)"
        if _libc.fallocate(self.fd, _FALLOC_FL_KEEP_SIZE, size, need) and ctypes.get_errno() in FULL:
            return f"{self.disk}: needs {need} bytes: {os.strerror(ctypes.get_errno())}"
        # A file system without fallocate(2) (some network ones): the look at its free space has to do.
        self._reserved = size + need
        return None

    def trim(self) -> None:
        os.ftruncate(self.fd, self.size)

    def close(self) -> None:
        """Remove it. After publishing there is nothing left to remove."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._linked:
            self._linked = False
            Path(self.path).unlink(missing_ok=True)


class GrowingHash:
    """sha256 of a file while it grows, on a thread of its own.

    Hashing is no faster than writing (1.3 against 1.5 GB/s on one core), so doing both on one thread halves the
    rate. The file is read back through its mapped pages in long updates: hashing and writing both run without
    the interpreter's lock, and the lock changes hands once a row, not once a small buffer.
    """

    def __init__(self, fd: int):
        self._fd, self._at, self._sha = fd, 0, hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard-hash")

    def advance(self, size: int) -> None:
        """The first `size` bytes will not change any more."""
        self._pool.submit(self._update, size)

    def _update(self, size: int) -> None:
        base = self._at - self._at % mmap.ALLOCATIONGRANULARITY
        if size > self._at:
            with (
                mmap.mmap(self._fd, size - base, mmap.MAP_SHARED, mmap.PROT_READ, offset=base) as mapped,
                memoryview(mapped) as view,
                view[self._at - base :] as fresh,
            ):
                self._sha.update(fresh)
            self._at = size

    def finish(self, size: int) -> str:
        """The hexadecimal sha256 of the whole file."""
        self._pool.submit(self._update, size).result()  # also what an earlier update could not do
        self.close()
        return self._sha.hexdigest()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
