"""A store that cannot be reached: told at once where it never answered, ridden out where it did."""

import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.exceptions as boto
import pytest
from make_output import MadeOutput, make_output
from s3 import ENVIRONMENT, Bucket
from torch.utils.data import DataLoader

from hs_ray import export as exporting
from hs_ray.config import ExtractJob
from hs_ray.describe import describe
from hs_ray.errors import OutputError
from hs_ray.export import export
from hs_ray.pipeline import driver
from hs_ray.reader import HiddenStatesDataset
from hs_ray.storage import Storage, open_storage, s3_requests
from hs_ray.verify import verify_integrity

URL = "http://nowhere.invalid"
NO_CONNECTION = [  # none of them one of Python's ConnectionErrors
    boto.EndpointConnectionError(endpoint_url=URL),  # refused, no such host
    boto.ConnectTimeoutError(endpoint_url=URL),
    boto.ProxyConnectionError(proxy_url=URL),
    boto.SSLError(endpoint_url=URL, error="handshake"),
]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options for an endpoint that refuses connections, which is given up after 2 s."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    monkeypatch.setattr(s3_requests, "FIRST_ANSWER_S", 2.0)
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port meanwhile
        taken.bind(("127.0.0.1", 0))
        yield {"endpoint_url": f"http://127.0.0.1:{taken.getsockname()[1]}"}


def failing(storage: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> list[str]:
    """The next requests of a storage fail like this. Returns the list of all requests from now on."""
    fs = storage._client._connection(0).fs  # type: ignore[attr-defined]
    send, asked = fs._call_s3, list[str]()

    async def call(method: str, **kwargs: Any) -> Any:
        asked.append(method)
        if len(asked) <= times:
            raise error
        return await send(method, **kwargs)

    monkeypatch.setattr(fs, "_call_s3", call)
    return asked


STARTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "extract": lambda options: driver.run(extract_job(options)),
    "verify": lambda options: verify_integrity(open_storage("s3://b/x", options)),
    "describe": lambda options: describe("s3://b/x", options),
    "export": lambda options: export("s3://b/x", "speculators", "/nowhere", storage_options=options),
    "reader": lambda options: HiddenStatesDataset("s3://b/x", storage_options=options),
}


def extract_job(options: dict[str, Any]) -> ExtractJob:
    job = ExtractJob()
    job.model.path, job.output.path, job.output.storage_options = "builtin:tiny_random", "s3://b/x", options
    return job


@pytest.mark.parametrize("start", STARTS)
def test_every_job_says_at_its_start_that_there_is_no_store(
    closed: dict[str, Any], start: str, tiny_random: Path
) -> None:
    with pytest.raises(OutputError) as caught:
        STARTS[start](closed)
    text = str(caught.value)
    assert "s3://b/x" in text and "no answer from the store (EndpointConnectionError: " in text
    assert f"output.storage_options.endpoint_url = {closed['endpoint_url']}: an address that answers from here" in text


def test_the_longest_wait_for_a_first_answer_leaves_time_to_start() -> None:
    assert s3_requests.FIRST_ANSWER_S <= 10


@pytest.mark.parametrize("options", [{"endpoint_url": "nowhere"}, {"profile": "nobody"}])
def test_settings_that_botocore_does_not_take(closed: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises(OutputError, match=r"s3://b/x/a: get_object: .*; check output.path, output.storage_options"):
        open_storage("s3://b/x", options).read_bytes("a")


@pytest.mark.integration
def test_a_store_that_takes_connections_and_is_silent(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_requests, "FIRST_ANSWER_S", 0.2)
    s3.fault("GET", "hang", seconds=1.0, times=9)
    with pytest.raises(OutputError, match=r"no answer from the store \(TimeoutError: nothing within 0.2 s\)"):
        s3.storage().read_bytes("a")


@pytest.mark.integration
@pytest.mark.parametrize("error", NO_CONNECTION, ids=lambda error: type(error).__name__)
def test_a_connection_that_does_not_come_about_is_tried_again(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    storage = s3.storage()
    storage.write("a", b"1")
    monkeypatch.setattr(s3_requests, "FIRST_ANSWER_S", 0.0)  # it has answered: this patience is not what counts
    asked = failing(storage, monkeypatch, error, times=2)
    assert storage.read_bytes("a") == b"1" and len(asked) == 3


@pytest.mark.integration
def test_in_the_middle_of_a_run_it_is_a_failure_of_the_store(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = s3.storage(retry_seconds=0.2)
    storage.write("a", b"1")
    failing(storage, monkeypatch, NO_CONNECTION[0], times=99)
    with pytest.raises(OSError, match=r"a: get_object: still failing after .*EndpointConnectionError"):
        storage.read_bytes("a")


@pytest.mark.integration
def test_a_store_that_says_it_is_busy_is_there(s3: Bucket) -> None:
    """Also with its first answer: it is waited for as long as in the middle of a run."""
    s3.fault("GET", "status", times=9)
    with pytest.raises(OSError, match=r"a: get_object: still failing after .*SlowDown"):
        s3.storage(retry_seconds=0).read_bytes("a")


@pytest.mark.integration
def test_an_actor_has_the_patience_of_its_driver(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may start while the store is unwell."""
    storage = s3.storage()
    storage.check_writable()
    s3.put("a", b"1")
    theirs = pickle.loads(pickle.dumps(storage))
    monkeypatch.setattr(s3_requests, "FIRST_ANSWER_S", 0.0)
    failing(theirs, monkeypatch, TimeoutError(), times=2)
    assert theirs.read_bytes("a") == b"1"


# ---- processes that begin while the store is unwell, of a job that has read from it ----


@pytest.fixture
def stored(s3: Bucket, tmp_path: Path) -> MadeOutput:
    """An output, which is in the bucket too."""
    made = make_output(tmp_path / "out", final="both")
    for file in made.path.rglob("*"):
        if file.is_file():
            s3.put(file.relative_to(made.path).as_posix(), file.read_bytes())
    return made


def unwell(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops two requests; whoever does not know that it has answered once gives it up at the first."""
    monkeypatch.setattr(s3_requests, "FIRST_ANSWER_S", 0.0)
    s3.fault(".*", "before", times=2)


@pytest.mark.integration
@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_has_the_patience_of_its_dataset(
    s3: Bucket, stored: MadeOutput, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    dataset = HiddenStatesDataset(s3.url, columns=[], storage_options=s3.options)
    if not workers:
        dataset = pickle.loads(pickle.dumps(dataset))  # as a spawned worker has it
    unwell(s3, monkeypatch)
    got = [sample["sample_id"] for sample in DataLoader(dataset, batch_size=None, num_workers=workers)]
    assert got == [stored.samples[i].sample_id for i in stored.committed] and not s3.faults[0].times


@pytest.mark.integration
def test_an_exports_workers_have_its_patience(
    s3: Bucket, stored: MadeOutput, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def results(tasks: list[Any], workers: int) -> Iterator[Any]:
        unwell(s3, monkeypatch)
        return map(exporting.export_unit, pickle.loads(pickle.dumps(tasks)))

    monkeypatch.setattr(exporting, "_results", results)
    export(s3.url, "specforge", str(tmp_path / "x"), storage_options=s3.options)
    assert len(list((tmp_path / "x").rglob("*.ckpt"))) == len(stored.committed) and not s3.faults[0].times
