"""S3 requests with one retry policy: every request is tried again while the store is only unwell.

s3fs brings the connection (credentials from the usual AWS places, region, endpoint) and its event loop; the
requests are made here, because s3fs retries by request kind, uploads parts in lockstep and leaves an answer
lost on the way to its caller. Here: 5xx, SlowDown, time-outs and connections that are dropped or do not come about are
tried again with growing pauses for `retry_seconds`; a lost answer is resolved by looking at what is there; a refusal
(403, no such bucket, no credentials, settings that botocore does not take) is an OutputError at once; 404 is
FileNotFoundError.

A store that has not answered at all yet is more likely misspelt than unwell: it is given up after `FIRST_ANSWER_S`, as
an OutputError.
"""

import asyncio
import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions as boto
import s3fs

from hs_ray.errors import HsRayError, OutputError

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PARTS = 10_000
READERS = 64  # small objects read at once
FIRST_ANSWER_S = 8.0  # a job says within 20 s of its start that there is no store, and it has to start itself
TRANSIENT_CODES = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "ConditionalRequestConflict",  # two conditional writes of one key at once: AWS says to try again
    "OperationAborted",
    "IncompleteBody",
    "BadDigest",  # damaged on the way: the checksum did its work
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
}
TRANSIENT_ERRORS = (
    boto.ConnectionError,  # no connection: refused, timed out, no such host, TLS; not one of Python's ConnectionErrors
    boto.HTTPClientError,  # connection closed, answer timed out or cut off
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ConnectionError,
)
REFUSED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "NoSuchBucket"}
NO_CREDENTIALS = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.TokenRetrievalError)


def is_transient(error: BaseException) -> bool:
    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or error.response.get("Error", {}).get("Code") in TRANSIENT_CODES
    parse_error = type(error).__name__ == "ResponseParserError"  # a throttled store may answer with broken XML
    return isinstance(error, TRANSIENT_ERRORS) or parse_error


class S3Requests:
    """Requests to one bucket, as coroutines of one event loop.

    part_bytes: size of a part of an upload and of a range of a long read. concurrency: parts in memory at once.
    retry_seconds: how long an unwell store is waited for. answered: set once the store has said anything.
    """

    def __init__(
        self,
        fs: s3fs.S3FileSystem,
        bucket: str,
        part_bytes: int,
        concurrency: int,
        retry_seconds: float,
        answered: threading.Event,
    ):
        self.fs, self.bucket, self.part_bytes, self.retry_seconds = fs, bucket, part_bytes, retry_seconds
        self.answered = answered
        fs.retries = 1  # retries are ours alone
        self._uploads = asyncio.Semaphore(concurrency)
        self._reads = asyncio.Semaphore(READERS)

    async def _retry(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        start, pause = time.monotonic(), 0.1
        while True:
            try:
                return await request()
            except Exception as error:
                cause = error.__cause__ if isinstance(error.__cause__, boto.ClientError) else error
                if isinstance(cause, boto.ClientError):
                    self.answered.set()
                waited, answered = time.monotonic() - start, self.answered.is_set()
                if not is_transient(cause):
                    raise self._explain(what, cause) from error
                patience = self.retry_seconds if answered else min(self.retry_seconds, FIRST_ANSWER_S)
                if waited + pause > patience:
                    raise self._give_up(what, cause, waited) from error
                level = logging.WARNING if answered else logging.INFO  # at a start that fails, the error says it all
                log.log(level, "%s: %s; trying again in %.1f s", what, cause, pause)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, 15.0)

    async def _send(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """One request, to the head of its answer. The very first is not waited for longer than FIRST_ANSWER_S."""
        await self.fs.set_session()  # reads files, on a busy machine for seconds: that is no silence of the store
        try:
            async with asyncio.timeout(None if self.answered.is_set() else FIRST_ANSWER_S):
                answer: dict[str, Any] = await self.fs._call_s3(method, Bucket=self.bucket, **kwargs)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"nothing within {FIRST_ANSWER_S:g} s") from error
        self.answered.set()
        return answer

    def _give_up(self, what: str, cause: BaseException, waited_s: float) -> Exception:
        """What hs_ray raises for a transient error that stayed."""
        reason = f"{type(cause).__name__}: {cause}"
        if self.answered.is_set():
            return OSError(errno.EIO, f"{what}: still failing after {waited_s:.0f} s ({reason})")
        endpoint = self.fs.endpoint_url or "the one of the AWS_ variables, or AWS itself"
        return OutputError(
            f"{what}: no answer from the store ({reason}); output.storage_options.endpoint_url = {endpoint}: "
            "an address that answers from here; check it, and the network"
        )

    def _explain(self, what: str, cause: BaseException) -> BaseException:
        """What hs_ray raises for an error that another try will not mend."""
        if isinstance(cause, NO_CREDENTIALS):
            return OutputError(f"{what}: {cause}; set AWS_ACCESS_KEY_ID, AWS_PROFILE or anon=true")
        if isinstance(cause, boto.BotoCoreError | ValueError) and not self.answered.is_set():  # nothing was sent yet
            return OutputError(f"{what}: {cause}; check output.path, output.storage_options and the AWS_ variables")
        if not isinstance(cause, boto.ClientError):
            return cause
        code = cause.response.get("Error", {}).get("Code", "")
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in REFUSED_CODES or status in (401, 403):
            return OutputError(f"{what}: refused by the store: {cause}")
        if status == 404:
            return FileNotFoundError(errno.ENOENT, f"{what}: {cause}")
        if status == 412:
            return FileExistsError(errno.EEXIST, f"{what}: {cause}")
        return OSError(errno.EIO, f"{what}: {cause}")

    async def call(self, method: str, **kwargs: Any) -> dict[str, Any]:
        what = f"s3://{self.bucket}/{kwargs.get('Key', kwargs.get('Prefix', ''))}: {method}"
        return await self._retry(what, lambda: self._send(method, **kwargs))

    async def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        extra = {} if length is None else {"Range": f"bytes={start}-{start + length - 1}"}

        async def request() -> bytes:
            answer = await self._send("get_object", Key=key, **extra)
            async with answer["Body"] as body:
                data = await body.read()
            if len(data) != answer["ContentLength"]:
                raise ConnectionError(f"answer cut off: {len(data)} of {answer['ContentLength']} bytes")
            return data

        async with self._reads:
            return await self._retry(f"s3://{self.bucket}/{key}: get_object", request)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """A long range comes as several requests at once: one stream of S3 gives about 100 MB/s."""
        stop, step = start + length, self.part_bytes
        spans = [(at, min(step, stop - at)) for at in range(start, stop, step)]
        return b"".join(await asyncio.gather(*[self.get(key, at, count) for at, count in spans]))

    async def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return list(await asyncio.gather(*[self.get(key) for key in keys]))

    async def size(self, key: str) -> int:
        return int((await self.call("head_object", Key=key))["ContentLength"])

    async def create(self, key: str, data: bytes) -> bool:
        try:
            await self.call("put_object", Key=key, Body=data, IfNoneMatch="*")
            return True
        except FileExistsError:
            # Our own earlier try may have arrived although its answer was lost: `data` names its writer.
            with contextlib.suppress(FileNotFoundError):
                return await self.get(key) == data
            return False

    async def list_prefix(self, prefix: str) -> list[tuple[str, int, float]]:
        found: list[tuple[str, int, float]] = []
        more: dict[str, str] = {}
        while True:
            page = await self.call("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
            for item in page.get("Contents", []):
                found.append((item["Key"], item["Size"], item["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def upload(self, fd: int, size: int, key: str) -> None:
        part_bytes = max(self.part_bytes, -(-size // MAX_PARTS))
        if size <= part_bytes:
            async with self._uploads:
                body = await asyncio.to_thread(os.pread, fd, size, 0)
                await self.call("put_object", Key=key, Body=body)
        else:
            await self._upload_parts(fd, size, key, part_bytes)
        stored = await self.size(key)
        if stored != size:
            raise HsRayError(f"s3://{self.bucket}/{key}: {stored} bytes arrived of {size}")

    async def _upload_parts(self, fd: int, size: int, key: str, part_bytes: int) -> None:
        """Invisible until completed. S3 checks each part against the CRC32 that botocore sends with it."""
        upload = (await self.call("create_multipart_upload", Key=key))["UploadId"]

        async def send(number: int) -> dict[str, Any]:
            async with self._uploads:
                body = await asyncio.to_thread(os.pread, fd, part_bytes, (number - 1) * part_bytes)
                answer = await self.call("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        tasks = [asyncio.ensure_future(send(i + 1)) for i in range(-(-size // part_bytes))]
        try:
            parts = {"Parts": list(await asyncio.gather(*tasks))}
            try:
                await self.call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload=parts)
            except FileNotFoundError:  # completed by an earlier try whose answer was lost: head_object decides
                log.info("s3://%s/%s: upload already completed", self.bucket, key)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # no part may arrive after the abort
            with contextlib.suppress(Exception):  # else the next start aborts it
                await self.fs._call_s3("abort_multipart_upload", Bucket=self.bucket, Key=key, UploadId=upload)
            raise

    async def abort_uploads(self, prefix: str) -> int:
        aborted = 0
        marks: dict[str, str] = {}
        while True:
            page = await self.call("list_multipart_uploads", Prefix=prefix, **marks)
            for item in page.get("Uploads", []):
                with contextlib.suppress(FileNotFoundError):
                    await self.call("abort_multipart_upload", Key=item["Key"], UploadId=item["UploadId"])
                aborted += 1
            if not page.get("IsTruncated"):
                return aborted
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
