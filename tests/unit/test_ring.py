"""The shared memory's allocator: no overlap, nothing lost, strictly in order of asking."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hs_ray.engine.ring import ALIGN, Extent, Ring
from hs_ray.errors import CaptureError


def test_random_use_never_overlaps_and_ends_empty() -> None:
    ring, rng = Ring(64 * ALIGN), random.Random(0)
    held: list[Extent] = []
    for _ in range(2000):
        if held and (rng.random() < 0.5 or ring.used > 40 * ALIGN):
            ring.release(held.pop(rng.randrange(len(held))))
        else:
            held.append(ring.reserve(rng.randint(1, 5 * ALIGN))[0])
        spans = sorted((e.offset, e.offset + e.size) for e in held)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert ring.used == sum(e.size for e in held)
    for extent in held:
        ring.release(extent)
    assert ring.used == 0
    assert ring.reserve(ring.size)[0] == Extent(0, ring.size)  # free pieces were joined again


def test_a_large_sample_is_not_starved_by_small_ones() -> None:
    ring = Ring(4 * ALIGN)
    first = ring.reserve(3 * ALIGN)[0]
    order: list[str] = []

    def ask(name: str, size: int) -> None:
        ring.reserve(size)
        order.append(name)

    def ask_in_vain() -> None:
        with pytest.raises(CaptureError):
            ask("small", ALIGN)

    large = threading.Thread(target=ask, args=("large", 4 * ALIGN))
    large.start()
    while ring._next_turn < 2:
        time.sleep(0.001)
    small = threading.Thread(target=ask_in_vain, daemon=True)
    small.start()
    while ring._next_turn < 3:
        time.sleep(0.001)
    assert order == []  # the small one would fit, and waits its turn
    ring.release(first)
    large.join(10)
    assert order == ["large"]
    ring.close()


def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(CaptureError, match="12,288 bytes of shared memory and there are 8,192 in all"):
        Ring(2 * ALIGN).reserve(2 * ALIGN + 1)


def test_closing_wakes_who_waits() -> None:
    ring = Ring(ALIGN)
    ring.reserve(ALIGN)
    failed: list[str] = []

    def ask() -> None:
        try:
            ring.reserve(ALIGN)
        except CaptureError as error:
            failed.append(str(error))

    waiter = threading.Thread(target=ask)
    waiter.start()
    while ring._next_turn < 2:
        time.sleep(0.001)
    ring.close("the engine died")
    waiter.join(10)
    assert failed == ["the engine died"]


def test_views_are_the_columns_one_after_the_other() -> None:
    ring = Ring(4 * ALIGN)
    ring.reserve(ALIGN)
    extent = ring.reserve(2 * 3 * 8 * 2)[0]
    views = ring.view(extent, columns=2, num_tokens=3, hidden_size=8)
    for number, view in enumerate(views):
        view[:] = number + 1
    assert [view.shape for view in views] == [(3, 8), (3, 8)]
    with Path(ring.path).open("rb") as file:  # as the scheduler process sees it
        file.seek(extent.offset)
        assert np.frombuffer(file.read(96), np.uint16).tolist() == [1] * 24 + [2] * 24
    ring.fill(extent, 0xFF)
    assert (views[0] == 0xFFFF).all()
