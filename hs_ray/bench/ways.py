"""The ways that are timed. Each runs in a process of its own, since an engine ends every child of its process."""

import contextlib
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hs_ray.bench.prompts import Prompts
from hs_ray.engine.bare import BareEngine
from hs_ray.engine.engine import HiddenStateEngine
from hs_ray.engine.options import EngineOptions
from hs_ray.engine.ticket import Ticket
from hs_ray.extract import extract_unit
from hs_ray.plan.files import unit_buckets
from hs_ray.schema import Sample
from hs_ray.storage import Storage, open_storage
from hs_ray.writer import ShardWriter

SHARE = 8  # transformers gets one in so many of the prompts


@dataclass(frozen=True)
class Setting:
    options: EngineOptions
    folder: str  # where capture + write writes
    writers: int  # units in the engine at once, as in the job
    unit_tokens: int  # of a unit, as in the job's plan
    compression: str = "none"


class Way(Protocol):
    def time(self, prompts: Prompts) -> dict[str, float]:
        """`seconds` from the first prompt to the last result; `waited`, `idle`: see `timing.Row`; `tokens` if fewer."""

    def close(self) -> None: ...


class Bare:
    """SGLang as it comes, with our arguments: nothing patched, nothing captured."""

    def __init__(self, setting: Setting):
        self.engine = BareEngine(setting.options)

    def time(self, prompts: Prompts) -> dict[str, float]:
        start = time.perf_counter()
        self.engine.prefill(prompts)
        return {"seconds": time.perf_counter() - start}

    def close(self) -> None:
        self.engine.close()


class Capture:
    """Our engine; the states are complete in shared memory, and dropped."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.engine = HiddenStateEngine(setting.options)

    def time(self, prompts: Prompts) -> dict[str, float]:
        start, busy = time.perf_counter(), self.engine.busy_s
        waited = self._run(prompts)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "waited": waited, "idle": seconds - (self.engine.busy_s - busy)}

    def _run(self, prompts: Prompts) -> float:
        waited = 0.0
        with ThreadPoolExecutor(1) as feeder:
            for submitted in [feeder.submit(self.engine.submit, prompt) for prompt in prompts]:
                ticket: Ticket = submitted.result()
                ticket.future.result(timeout=600)
                waited += ticket.waited_s
                self.engine.release(ticket)
        return waited

    def close(self) -> None:
        self.engine.close()


class CaptureWrite(Capture):
    """Our engine and the job's writers: shards and markers on a file system."""

    def time(self, prompts: Prompts) -> dict[str, float]:
        self.folder = tempfile.mkdtemp(prefix="hs_ray_bench-", dir=self.setting.folder)
        try:
            return super().time(prompts)
        finally:
            shutil.rmtree(self.folder)  # not timed: freeing the pages of 25 GB in memory takes seconds

    def _run(self, prompts: Prompts) -> float:
        storage = open_storage(self.folder)
        units = _units(prompts, self.setting.unit_tokens)
        with ThreadPoolExecutor(self.setting.writers) as pool:
            return sum(pool.map(lambda item: self._unit(storage, *item), enumerate(units)))

    def _unit(self, storage: Storage, unit: int, samples: list[Sample]) -> float:
        writer = ShardWriter(
            storage, unit, "0001-bench", 1, self.setting.options.spec, self.setting.compression, {}, "bench", 0
        )
        waited = extract_unit(self.engine, writer, samples)
        writer.commit("bench", 0.0)
        return waited


def _units(prompts: Prompts, unit_tokens: int) -> list[list[Sample]]:
    """As a job's plan cuts them."""
    units: dict[int, list[Sample]] = {}
    buckets = unit_buckets(np.array([len(ids) for ids in prompts]), unit_tokens)
    for line, (ids, bucket) in enumerate(zip(prompts, buckets.tolist(), strict=True)):
        sample = Sample(f"s{line}", "bench", line, ids, np.ones(len(ids), np.uint8))
        units.setdefault(bucket, []).append(sample)
    return list(units.values())


class Transformers:
    """What people write by hand: transformers, hooks, `.cpu()`, one `torch.save` a sample. Slow: on some prompts.

    The model is called as EAGLE's own `ge_data` scripts call it: whole, so its head computes logits of every token.
    """

    def __init__(self, setting: Setting):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.setting = setting
        options = setting.options
        if options.args.get("load_format") == "dummy":
            config = AutoConfig.from_pretrained(options.model_path)
            with torch.device(options.device):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        else:
            model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=torch.bfloat16)
        self.model = model.to(options.device).eval()
        self.kept: dict[str, Any] = {}
        inner = self.model.model
        for name, module in [(f"hidden_{i}", inner.layers[i]) for i in options.spec.layers if i < len(inner.layers)] + [
            ("final", inner.norm)
        ]:
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._keep(name, args, kwargs), with_kwargs=True
            )

    def _keep(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kept[name] = args[0] if args else kwargs["hidden_states"]

    def time(self, prompts: Prompts) -> dict[str, float]:
        import torch

        folder = Path(tempfile.mkdtemp(prefix="hs_ray_bench-", dir=self.setting.folder))
        some = prompts[: max(1, len(prompts) // SHARE)]
        start = time.perf_counter()
        try:
            for index, prompt in enumerate(some):
                ids = torch.from_numpy(prompt.astype("int64"))[None].to(self.setting.options.device)
                with torch.no_grad():
                    self.model(ids, use_cache=False)
                torch.save({name: state[0].cpu() for name, state in self.kept.items()}, folder / f"{index}.pt")
            return {"seconds": time.perf_counter() - start, "tokens": sum(len(prompt) for prompt in some)}
        finally:
            shutil.rmtree(folder)

    def close(self) -> None:
        self.kept.clear()


def serve(connection: Connection, make: Callable[[Setting], Way], setting: Setting) -> None:
    """The process of one way: time what comes over the connection until None does."""
    try:
        way = make(setting)
        connection.send("ready")
        while (prompts := connection.recv()) is not None:
            connection.send(way.time(prompts))
        way.close()
    except BaseException:  # noqa: BLE001  (whatever it is, the other end waits for it)
        with contextlib.suppress(OSError):  # the other end may be what is gone
            connection.send({"error": traceback.format_exc()})
        os._exit(1)  # SGLang's threads would keep this process; its processes end with it
