"""One proof, in a process of its own: twin -> transformers -> SGLang with capture -> comparison.

An engine ends every child of its process and a scheduler that fails in a batch kills its parent, so nothing else may
live in that process.
"""

import contextlib
import importlib.metadata
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hs_ray.engine import patching
from hs_ray.engine.canary import as_float32
from hs_ray.engine.models import entry_for, refusal
from hs_ray.engine.options import EngineOptions
from hs_ray.errors import UnsupportedError
from hs_ray.model import text_part
from hs_ray.prove import quirks
from hs_ray.prove.compare import ColumnResult, States, compare, table, worst_of
from hs_ray.prove.proofs import Proof
from hs_ray.prove.reference import Reference, load_model
from hs_ray.prove.request import Request
from hs_ray.prove.shrink import VOCAB
from hs_ray.prove.twin import make_twin, reference_folder
from hs_ray.schema import CaptureSpec

CHUNK = 128  # tokens of one forward pass: the longer prompts are split
LENGTHS = (1, 5, 100, 128, 129, 300)
RESERVED = 64  # ids at the end of the vocabulary that special tokens have
REQUEST_SECONDS = 300

Prompts = Sequence[npt.NDArray[np.int32]]


def measure(request: Request) -> Proof:
    """Run the proof. Raises UnsupportedError for a class without an entry. A batch that fails ends the process."""
    entry = entry_for(request.architecture, request.release)
    if entry is None:
        raise UnsupportedError(str(refusal(request.architecture, request.release)))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hs_ray-prove-") as name:
        folder = Path(name)
        config = make_twin(
            request.config, folder, request.tp_size, request.seed, Path(request.code) if request.code else None
        )
        spec = spec_of(config)
        prompts = make_prompts(request.seed)
        truth, bf16 = reference_states(request, folder, spec, prompts)
        with running_engine(request, folder, spec) as engine:
            runs = [compare(ours, truth, bf16, spec.columns) for ours in all_ways(engine, prompts)]
            attention = engine.attention_backend
    return _proof(request, str(entry), worst_of(runs), attention, time.monotonic() - started)


def spec_of(config: dict) -> CaptureSpec:
    """Every layer id and both finals."""
    text = text_part(config)
    n = int(text["num_hidden_layers"])
    return CaptureSpec(tuple(range(n + 1)), "both", n, int(text["hidden_size"]))


def make_prompts(seed: int) -> list[npt.NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB - RESERVED, length, dtype=np.int32) for length in LENGTHS]


def reference_states(
    request: Request, folder: Path, spec: CaptureSpec, prompts: Prompts
) -> tuple[list[States], list[States]]:
    """transformers in fp32 and in bf16, on the device of the proof: one item a prompt."""
    import torch

    found: list[list[States]] = []
    for dtype in (torch.float32, torch.bfloat16):
        reference = Reference(
            load_model(reference_folder(folder), dtype, request.device, request.code is not None), spec
        )
        found.append([reference.states(prompt) for prompt in prompts])
        del reference
    if request.device == "cuda":
        torch.cuda.empty_cache()
    return found[0], found[1]


@contextlib.contextmanager
def running_engine(request: Request, folder: Path, spec: CaptureSpec) -> Iterator[Any]:
    from hs_ray.engine.engine import HiddenStateEngine

    longest = 4 * max(LENGTHS)
    options = EngineOptions(
        spec=spec,
        architecture=request.architecture,
        model_path=str(folder),
        release=request.release,
        vocab_size=VOCAB,
        context_length=longest * 2,
        max_seq_len=longest,
        device=request.device,
        ring_bytes=4 * sum(LENGTHS) * spec.bytes_per_token,
        tp_size=request.tp_size,
        trust_remote_code=request.code is not None,
        chunked_prefill_size=CHUNK,
        attention_backend=request.attention_backend,
        args=quirks.server_args(request),
    )
    with quirks.scheduler_entry(request):
        engine = HiddenStateEngine(options, poison=True)
    try:
        yield engine
    finally:
        engine.close()


def all_ways(engine: Any, prompts: Prompts) -> list[list[States]]:
    """The same prompts one after another, all together, and together in another order: states by prompt."""
    alone = [together(engine, [prompt])[0] for prompt in prompts]
    batched = together(engine, prompts)
    backwards = together(engine, list(reversed(prompts)))
    return [alone, batched, list(reversed(backwards))]


def together(engine: Any, prompts: Prompts) -> list[States]:
    tickets = [engine.submit(prompt) for prompt in prompts]
    columns = engine.options.spec.columns
    found: list[States] = []
    for ticket in tickets:
        sample = ticket.future.result(timeout=REQUEST_SECONDS)
        found.append({name: as_float32(state) for name, state in zip(columns, sample.states, strict=True)})
        engine.release(ticket)
    return found


def _proof(request: Request, how: str, results: Sequence[ColumnResult], attention: str, seconds: float) -> Proof:
    key = request.key
    names = ("torch", "transformers")
    versions = {name: importlib.metadata.version(name) for name in names}
    versions["patch"] = patching.Patch.for_release(request.release).digest[:12]
    versions["hardware"] = _hardware(request.device)
    versions["attention"] = attention
    return Proof(
        architecture=key.architecture,
        release=key.release,
        device=key.device,
        parallel=key.parallel,
        how=how,
        ok=all(result.ok for result in results),
        errors={result.column: round(result.error, 5) for result in results},
        bf16_errors={result.column: round(result.bf16_error, 5) for result in results},
        worst_token=round(max(result.worst for result in results), 5),
        table=table(results),
        versions=versions,
        date=datetime.now(UTC).date().isoformat(),
        seconds=round(seconds, 1),
    )


def _hardware(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_name())
