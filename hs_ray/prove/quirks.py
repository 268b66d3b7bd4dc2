"""What a twin's engine gets and a production engine does not. None of it changes what is captured, or how."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hs_ray.model import text_part
from hs_ray.prove.request import Request

POOL = {"max_total_tokens": 4096, "max_running_requests": 16}
# Of the memory that is free at the start: the pool is bounded by its tokens, and others use the machine meanwhile.
TWIN_FRACTION = 0.5


def server_args(request: Request) -> dict[str, Any]:
    """A small KV pool, and the arguments of the request."""
    return {**POOL, "mem_fraction_static": TWIN_FRACTION, **request.args}


@contextlib.contextmanager
def scheduler_entry(request: Request) -> Iterator[None]:
    """While an engine starts: MLA on CPU goes through an entry of its own, see engine.cpu_mla."""
    if request.device == "cpu" and text_part(request.config).get("kv_lora_rank"):
        from hs_ray.engine.cpu_mla import MlaSchedulerEntry

        with mock.patch("hs_ray.engine.engine.SchedulerEntry", MlaSchedulerEntry):
            yield
    else:
        yield
