"""A disk or store that is unwell, told from a file that is missing or damaged: what is in order needs no mending."""

import errno
import sys

# An OSError of these says something of the file or its address (Arrow's for damage have no number); any other is of a
# disk or a store that is unwell.
OF_THE_FILE = {
    None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EINVAL, errno.ENOSYS, errno.EREMCHG,
}  # fmt: skip


def is_outage(error: BaseException) -> bool:
    """Whether a disk or a store is unwell, which passes; else the file is missing, damaged or not ours to read."""
    if isinstance(error, OSError):
        return isinstance(error, TimeoutError | ConnectionError) or error.errno not in OF_THE_FILE
    if "botocore" not in sys.modules:
        return False
    from hs_ray.storage.s3_requests import is_transient

    return is_transient(error)


def raise_outage(error: Exception) -> None:
    """For those who take what a read raises for damage: raise it as it is, where it is an OSError of an outage."""
    if isinstance(error, OSError) and is_outage(error):
        raise error
