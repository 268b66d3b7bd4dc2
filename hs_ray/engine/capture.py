"""Runs inside SGLang's scheduler process: the rows of every prefill batch, into the actor's shared memory.

The hunks of patches/sglang call the four functions at the end of this file:
    configure  before the attention backends start: layers set, and read back, on every rank
    begin      before a batch: which request, which tokens, which rows
    collect    at the logits processor: the states of the batch
    finish     after the forward pass: states matched to rows, and copied

Rows are matched by request id and token range alone, never by order, counter or time. A request id of ours
also carries the place reserved for its states, so that no table has to be kept equal in two processes.
Outside a scheduler that `entry` prepared, the four functions do nothing.

T rows (tokens) of a batch, H hidden_size, N decoder layers.
"""

import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hs_ray.engine.models import Entry, entry_for
from hs_ray.engine.patching import Patch
from hs_ray.engine.transport import RowRange, Transport
from hs_ray.errors import CaptureError, UnsupportedError
from hs_ray.schema import CaptureSpec

RID_PREFIX = "hs_ray"


def make_rid(serial: int, offset: int, num_tokens: int) -> str:
    """A request id that carries its extent. Fixed length: SGLang aborts by prefix."""
    return f"{RID_PREFIX}-{offset:016d}-{num_tokens:010d}-{serial:012d}"


def parse_rid(rid: str) -> tuple[int, int] | None:
    """(offset in the ring, num_tokens) of a request of ours; None for a warm-up or a health check."""
    prefix, _, rest = rid.partition("-")
    if prefix != RID_PREFIX:
        return None
    offset, num_tokens, _ = rest.split("-")
    return int(offset), int(num_tokens)


@dataclass(frozen=True)
class CaptureSetup:
    """Everything a scheduler process needs to capture; travels to it by pickle."""

    spec: CaptureSpec
    architecture: str
    release: str
    ring_path: str
    ring_size: int
    address: str  # abstract unix socket of the actor
    authkey: bytes


class Capture:
    def __init__(self, setup: CaptureSetup, patch: Patch, tp_rank: int):
        self.setup, self.patch, self.tp_rank = setup, patch, tp_rank
        self.transport: Transport | None = None
        self._native_ids: list[int] = []
        self._rows: list[RowRange] = []
        self._total = 0  # T of the batch in hand
        self._by_id: dict[int, torch.Tensor] = {}  # states that hooks took, by layer id
        self._aux: list[torch.Tensor] | None = None
        self._post_norm: torch.Tensor | None = None
        self._collected = 0
        self._active = False

    def configure(self, runner: Any) -> None:
        if getattr(runner, "is_draft_worker", False):
            raise UnsupportedError("speculative decoding is on: hs_ray captures the target model alone")
        self.patch.require_loaded()
        entry = entry_for(self.setup.architecture, self.setup.release)
        if entry is None:
            raise UnsupportedError(f"{self.setup.architecture}: no capture entry for SGLang {self.setup.release}")
        layer_model = _layer_model(runner.model)
        layers = layer_model.layers
        if len(layers) != self.setup.spec.num_hidden_layers:
            raise CaptureError(
                f"the engine's model has {len(layers)} decoder layers, "
                f"config.json says {self.setup.spec.num_hidden_layers}"
            )
        self._install(runner.model, layer_model, entry)
        if self.tp_rank == 0:
            device = next(layer_model.parameters()).device
            self.transport = Transport.connect(self.setup, device)
        gc.freeze()  # what was imported and loaded: a full collection of it would stop the GPU for half a second

    def _install(self, model: torch.nn.Module, layer_model: Any, entry: Entry) -> None:
        """Ask for every layer id of the spec, by the entry's way; read back what can be read back."""
        n = self.setup.spec.num_hidden_layers
        wanted = [i for i in self.setup.spec.layers if i < n]
        ours = entry.how in ("hook", "boundary")
        watched = wanted if ours else [i for i in wanted if i == 0 and entry.embedding_hook]
        self._native_ids = [i for i in wanted if i not in watched]
        for i in watched:
            if entry.how == "boundary":
                self._watch_boundary(i, layer_model.layers[i])
            else:
                hook = self._layer_hook(i, entry.residual)
                layer_model.layers[i].register_forward_pre_hook(hook, with_kwargs=True)
        if self._native_ids:
            if entry.how == "setter":
                layer_model.set_eagle3_layers_to_capture(list(self._native_ids))
                flagged = [
                    i for i, layer in enumerate(layer_model.layers) if getattr(layer, "_is_layer_to_capture", False)
                ]
                if flagged != self._native_ids:
                    raise CaptureError(f"asked for layers {self._native_ids}, the model flagged {flagged}")
            else:
                if not hasattr(layer_model, "layers_to_capture"):
                    raise UnsupportedError(f"{type(layer_model).__name__} has no layers_to_capture")
                layer_model.layers_to_capture = list(self._native_ids)
            _logits_owner(model).capture_aux_hidden_states = True
        getattr(layer_model, entry.norm).register_forward_hook(self._norm_hook(entry.residual))

    def _layer_hook(self, layer_id: int, add_residual: bool) -> Callable[..., None]:
        """A pre-hook that keeps hidden + residual (or hidden alone) as they enter a decoder layer."""

        def hook(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._active:
                return
            bound = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
            hidden, residual = bound.get("hidden_states"), bound.get("residual") if add_residual else None
            if not isinstance(hidden, torch.Tensor) or getattr(hidden, "_sglang_needs_allreduce_fusion", False):
                raise CaptureError(f"layer {layer_id}: its input is not a complete tensor ({type(hidden).__name__})")
            self._by_id[layer_id] = hidden.clone() if residual is None else hidden + residual

        return hook

    def _watch_boundary(self, layer_id: int, layer: Any) -> None:
        """Ask the layer's attention boundary for the state that it completes before the norm, on every call."""
        boundary = getattr(layer, "attn_boundary", None)
        if boundary is None:
            raise UnsupportedError(f"{type(layer).__name__} has no attn_boundary")
        prepare = boundary.prepare

        def keep(value: torch.Tensor, owned: bool = False) -> None:
            self._by_id[layer_id] = value if owned else value.clone()

        def watched(hidden_states: Any, forward_batch: Any, **call: Any) -> Any:
            return prepare(hidden_states, forward_batch, **{**call, "capture": keep} if self._active else call)

        boundary.prepare = watched

    def _norm_hook(self, returns_sum: bool) -> Callable[..., None]:
        """The final norm's input: with a residual the fused norm returns their sum as its second output."""

        def hook(norm: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._active:
                return
            n = self.setup.spec.num_hidden_layers
            if n in self._by_id:
                raise CaptureError("the final norm ran twice in one forward pass")
            self._by_id[n] = output[1] if returns_sum and isinstance(output, tuple) else args[0]

        return hook

    def begin(self, batch: Any) -> None:
        """Note which rows of the coming forward pass belong to which request."""
        self._reset()
        if batch is None or not batch.forward_mode.is_extend():
            return
        row = 0
        # Copied now: SGLang goes on to change these lists for the next chunk.
        for request, start, count in zip(batch.reqs, list(batch.prefix_lens), list(batch.extend_lens), strict=True):
            place = parse_rid(request.rid)
            if place is not None:
                offset, num_tokens = place
                if start + count > num_tokens:
                    raise CaptureError(f"{request.rid}: tokens {start}+{count} > {num_tokens} reserved")
                self._rows.append(RowRange(request.rid, offset, num_tokens, start, count, row))
            row += count
        self._total = row
        self._active = bool(self._rows)

    def collect(self, aux: Any, hidden: torch.Tensor) -> None:
        """Keep the states that reach the logits processor: T rows each."""
        if not self._active:
            return
        self._collected += 1
        self._post_norm = hidden
        if isinstance(aux, torch.Tensor):  # packed [T, K * H]
            aux = list(aux.split(self.setup.spec.hidden_size, dim=-1))
        self._aux = list(aux) if aux is not None else []

    def finish(self) -> None:
        """Check what the forward pass gave and hand it to the transport (rank 0)."""
        if not self._active:
            return
        columns = self._columns()
        if self.transport is not None:
            self.transport.send(self._rows, columns)
        self._reset()

    def _columns(self) -> list[torch.Tensor]:
        """The C state columns of the batch, [T, H] each, in the spec's order. Raises CaptureError."""
        spec = self.setup.spec
        if self._collected != 1:
            raise CaptureError(f"the logits processor ran {self._collected} times in one forward pass, not once")
        aux = self._aux or []
        if len(aux) != len(self._native_ids):
            raise CaptureError(f"asked for layers {self._native_ids}: {len(self._native_ids)} states, got {len(aux)}")
        states = {**dict(zip(self._native_ids, aux, strict=True)), **self._by_id}
        columns = [(f"hidden_{i}", states.get(i)) for i in spec.layers]
        columns += [
            (name, states.get(spec.num_hidden_layers) if name == "final_pre_norm" else self._post_norm)
            for name in spec.columns[len(spec.layers) :]
        ]
        for name, state in columns:
            if state is None:
                raise CaptureError(f"{name}: no state came out of the forward pass")
            if tuple(state.shape) != (self._total, spec.hidden_size) or state.dtype != torch.bfloat16:
                raise CaptureError(
                    f"{name}: expected {self._total} tokens x {spec.hidden_size} bfloat16, "
                    f"got {tuple(state.shape)} {state.dtype}; tokens by request: "
                    f"{[rows.count for rows in self._rows]}"
                )
        return [state for _, state in columns if state is not None]

    def _reset(self) -> None:
        self._rows, self._by_id, self._aux, self._post_norm = [], {}, None, None
        self._collected = self._total = 0
        self._active = False


def _layer_model(model: torch.nn.Module) -> Any:
    """The module that owns the decoder layers, behind whatever wrappers; SGLang's own way of finding it."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model

    return _resolve_transformer_layer_model(model)


def _logits_owner(model: torch.nn.Module) -> Any:
    """The module whose forward calls the logits processor: it must unpack (hidden, aux) from the layers."""
    seen: Any = model
    while not hasattr(seen, "logits_processor") or not hasattr(seen, "capture_aux_hidden_states"):
        seen = getattr(seen, "language_model", None)
        if seen is None:
            raise UnsupportedError(f"{type(model).__name__}: no module with capture_aux_hidden_states")
    return seen


_capture: Capture | None = None


def activate(capture: Capture) -> None:
    """Make this process a capturing scheduler; called once, by `entry`."""
    global _capture
    _capture = capture


def configure(runner: Any) -> None:
    if _capture is not None:
        _capture.configure(runner)


def begin(batch: Any) -> None:
    if _capture is not None:
        _capture.begin(batch)


def collect(aux: Any, hidden: torch.Tensor) -> None:
    if _capture is not None:
        _capture.collect(aux, hidden)


def finish() -> None:
    if _capture is not None:
        _capture.finish()
