"""A real S3 protocol server on loopback (moto's), behind a proxy that counts requests and breaks chosen ones.

def test_x(s3):                                   # from tests/conftest.py; a fresh bucket each time
    storage = s3.storage(retry_seconds=5)
    s3.fault("PUT .*marker", "after")             # the answer to the next such request is lost
    ...
    assert s3.requests == [...]                   # "METHOD /bucket/key?query"
"""

import http.client
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hs_ray.storage import Storage, open_storage

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "S3_UPLOAD_PART_MIN_SIZE": "1024",  # moto's: parts of a test need not be 5 MiB
    "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "5242880",
}
PART_BYTES = 256 * 1024


@dataclass
class Fault:
    """What happens to requests whose line matches `pattern`, after `skip` of them, `times` times.

    actions: `before` the connection drops and the server sees nothing; `during` it drops in the middle of the
    body; `after` the server did it and the answer is lost; `cut` half of the answer's body arrives; `hang` no
    answer for `seconds`, then it drops; `status` an S3 error with `status` and `code`.
    """

    pattern: str
    action: str
    times: int = 1
    skip: int = 0
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 3.0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms for an acknowledgement
    server: "_Proxy"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _relay(self) -> None:
        fault = self.server.take(f"{self.command} {self.path}")
        self.server.headers.get(self.command, []).extend(name.lower() for name in self.headers)
        length = int(self.headers.get("Content-Length", 0))
        if fault and fault.action == "during":
            self.rfile.read(length // 2)
            return self._drop()
        body = self.rfile.read(length)
        if fault and fault.action == "hang":
            time.sleep(fault.seconds)
        if fault and fault.action in ("before", "hang"):
            return self._drop()
        if fault and fault.action == "status":
            text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
            return self._answer(fault.status, [("Content-Type", "application/xml")], text, len(text))
        upstream = http.client.HTTPConnection(*self.server.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault and fault.action == "after":
            return self._drop()
        skip = ("content-length", "transfer-encoding", "connection", "date", "server")
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in skip]
        size = int(answer.getheader("Content-Length") or len(content))
        if fault and fault.action == "cut":
            self._answer(answer.status, headers, content[: len(content) // 2], size)
            return self._drop()
        self._answer(answer.status, headers, content, size)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, size: int) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: tuple[str, int]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.headers: dict[str, list[str]] = {}  # names of headers seen, by the methods that are recorded
        self._lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients go away in these tests

    def take(self, line: str) -> Fault | None:
        with self._lock:
            self.requests.append(line)
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, line):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


class S3Server:
    """moto and the proxy; `bucket()` gives a test its own bucket."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)  # moto reads its own at import
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer
        from moto.moto_server.werkzeug_app import MotoRequestHandler

        MotoRequestHandler.disable_nagle_algorithm = True
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        self.proxy = _Proxy(self._moto.get_host_and_port())
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.proxy.shutdown()
        self.proxy.server_close()
        self._moto.stop()

    @contextmanager
    def bucket(self) -> Iterator["Bucket"]:
        self.proxy.requests.clear()
        self.proxy.faults.clear()
        self.proxy.headers.clear()
        bucket = Bucket(self, f"bucket-{uuid.uuid4().hex[:12]}")
        self.backend.create_bucket(bucket.name, "us-east-1")
        try:
            yield bucket
        finally:
            self.proxy.faults.clear()

    @property
    def backend(self) -> Any:
        from moto.s3.models import s3_backends

        return s3_backends["123456789012"]["aws"]


class Bucket:
    def __init__(self, server: S3Server, name: str):
        self._server, self.name = server, name

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.proxy.server_port}"

    @property
    def url(self) -> str:
        return f"s3://{self.name}/runs/out"

    @property
    def options(self) -> dict[str, Any]:
        """`output.storage_options` for this bucket."""
        return {"endpoint_url": self.endpoint, "part_bytes": PART_BYTES, "retry_seconds": 10}

    def storage(self, **options: Any) -> Storage:
        return open_storage(self.url, self.options | options)

    @property
    def requests(self) -> list[str]:
        return self._server.proxy.requests

    def fault(self, pattern: str, action: str, **details: Any) -> Fault:
        fault = Fault(pattern, action, **details)
        self._server.proxy.faults.append(fault)
        return fault

    @property
    def faults(self) -> list[Fault]:
        return self._server.proxy.faults

    def record_headers(self, method: str) -> list[str]:
        """Names, in small letters, of the headers of requests of this method from now on."""
        return self._server.proxy.headers.setdefault(method, [])

    def put(self, path: str, data: bytes) -> None:
        """Straight into the server's memory: 10,000 objects in a second."""
        self._server.backend.put_object(self.name, f"runs/out/{path}", data)

    def uploads(self) -> int:
        """Multipart uploads begun and neither completed nor aborted."""
        return len(self._server.backend.get_bucket(self.name).multiparts)
