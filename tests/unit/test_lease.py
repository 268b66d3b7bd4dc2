"""Who may commit: one live driver, epochs that only grow, and what attempts leave on disk."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hs_ray import lease as lease_module
from hs_ray.errors import LostLeaseError, OutputError
from hs_ray.lease import Lease, begin_attempt, check_epoch, deaths, end_attempt, new_attempt
from hs_ray.storage import Storage, open_storage


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.integration)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return request.getfixturevalue("s3").storage()
    return open_storage(str(tmp_path))


def test_a_second_driver_is_told_who_holds_it(storage: Storage) -> None:
    lease = Lease.acquire(storage, 60, "alice's run")
    assert lease.epoch == 1
    with pytest.raises(OutputError, match=rf"in use by alice's run \(host .*, process {os.getpid()}, .* ago\)"):
        Lease.acquire(storage, 60, "bob's run")
    lease.check()


def test_a_release_lets_the_next_in_with_a_higher_epoch(storage: Storage) -> None:
    first = Lease.acquire(storage, 60, "a")
    first.start()
    first.release()
    second = Lease.acquire(storage, 60, "b")
    assert second.epoch == 2
    with pytest.raises(LostLeaseError, match="epoch 2, ours is 1"):
        first.check()
    assert [info.path for info in storage.list("_run/leases")] == ["_run/leases/000002.json"]
    first.release()  # late, and no harm to the new holder
    second.check()
    with pytest.raises(OutputError, match="in use by b"):
        Lease.acquire(storage, 60, "c")


def test_one_of_many_gets_it(storage: Storage) -> None:
    start, won, refused = threading.Barrier(6), [], []

    def race(number: int) -> None:
        start.wait()
        try:
            won.append(Lease.acquire(storage, 60, str(number)))
        except OutputError:
            refused.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused), won[0].epoch) == (1, 5, 1)


def test_a_dead_holder_on_another_host_ends_with_its_time_to_live(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ttl = 0.5 if storage.is_local else 2.0  # S3 stamps whole seconds
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "_host_identity", lambda: "another host")
        first = Lease.acquire(storage, ttl, "a")
    with pytest.raises(OutputError, match="in use by a"):
        Lease.acquire(storage, ttl, "b")
    time.sleep(ttl + (0.2 if storage.is_local else 1.1))
    second = Lease.acquire(storage, ttl, "b")
    assert second.epoch == 2
    with pytest.raises(LostLeaseError):
        first.check()


def test_heartbeats_keep_it(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    ttl = 0.5 if storage.is_local else 2.5
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "_host_identity", lambda: "another host")
        lease = Lease.acquire(storage, ttl, "a")
    lease.start()
    time.sleep(ttl + (0.2 if storage.is_local else 1.1))
    with pytest.raises(OutputError, match="in use by a"):
        Lease.acquire(storage, ttl, "b")
    lease.release()


def test_a_store_that_is_unwell_at_the_release_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let go in a `finally`: an error there would take the place of what the run came to."""
    storage = open_storage(str(tmp_path))
    lease = Lease.acquire(storage, 60, "a")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write", full)
    lease.release()
    monkeypatch.undo()
    assert json.loads(storage.read_bytes("_run/leases/000001.json"))["released"] is False


def test_a_heartbeat_survives_a_store_that_is_unwell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    lease = Lease.acquire(storage, 0.2, "a")
    beats = []

    def fail(path: str, data: bytes) -> None:
        beats.append(path)
        raise OSError(5, "unwell")

    monkeypatch.setattr(storage, "write", fail)
    lease.start()
    time.sleep(0.3)
    monkeypatch.undo()
    lease.release()
    assert len(beats) >= 2


def test_a_dead_holder_on_this_host_ends_at_once(storage: Storage) -> None:
    """kill -9 of the driver, and its pid may be used again: the start time of the process tells."""
    script = """
        import os, sys, pickle
        from hs_ray.lease import Lease
        Lease.acquire(pickle.loads(bytes.fromhex(sys.argv[1])), 3600, "killed").start()
        os.kill(os.getpid(), 9)
    """
    argument = pickle.dumps(storage).hex()
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script), argument], check=False)
    assert ended.returncode == -9
    assert Lease.acquire(storage, 60, "next").epoch == 2


def test_a_reused_pid_is_not_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "_process_start", lambda pid: "1")
        Lease.acquire(storage, 3600, "an earlier process with our pid")
    assert Lease.acquire(storage, 60, "next").epoch == 2


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"null", b"[]", b'{"holder": "x"}', b'{"released": 1}'])
def test_a_damaged_lease_is_named_and_can_be_let_go(tmp_path: Path, damage: bytes) -> None:
    """Its holder may live; its number is used, so that removing it would let older attempts commit."""
    storage, path = open_storage(str(tmp_path)), "_run/leases/000007.json"
    storage.write(path, damage)
    with pytest.raises(OutputError, match=rf"{path} is damaged .* then write \{{\"released\": true\}} into that file"):
        Lease.acquire(storage, 60, "next")
    storage.write(path, lease_module.RELEASED.encode())
    assert Lease.acquire(storage, 60, "next").epoch == 8


def test_a_lease_with_a_field_of_another_type(tmp_path: Path) -> None:
    storage, path = open_storage(str(tmp_path)), "_run/leases/000001.json"
    Lease.acquire(storage, 60, "a")
    info = json.loads(storage.read_bytes(path))
    storage.write(path, json.dumps(info | {"identity": "another host", "ttl_s": "60"}).encode())
    with pytest.raises(OutputError, match=rf"{path} is damaged \(ttl_s\)"):
        Lease.acquire(storage, 60, "next")


def test_clocks_of_two_hosts_are_never_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "_host_identity", lambda: "another host")
        Lease.acquire(storage, 60, "a")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(OutputError, match="in use by a"):
        Lease.acquire(storage, 60, "b")


def test_attempts_that_never_ended_are_deaths(storage: Storage) -> None:
    assert deaths(storage, 3, 1) == 0
    killed = begin_attempt(storage, 3, 1, "engine 0")
    assert killed.startswith("0001-") and deaths(storage, 3, 1) == 1
    clean = begin_attempt(storage, 3, 1, "engine 1")
    assert clean != killed and deaths(storage, 3, 1) == 2
    end_attempt(storage, 3, clean)
    end_attempt(storage, 3, clean)  # no error
    assert (deaths(storage, 3, 1), deaths(storage, 3, 2), deaths(storage, 30, 1)) == (1, 0, 0)
    mine = begin_attempt(storage, 3, 1, "engine 2", new_attempt(1))  # the store failed when its note was removed
    assert (deaths(storage, 3, 1), deaths(storage, 3, 1, {mine})) == (2, 1)


def test_check_epoch(storage: Storage) -> None:
    check_epoch(storage, 1)  # nobody holds it
    Lease.acquire(storage, 60, "a")
    check_epoch(storage, 1)
    with pytest.raises(LostLeaseError, match="epoch 1, ours is 0"):
        check_epoch(storage, 0)
