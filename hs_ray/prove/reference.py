"""The states of a transformers model at our layer ids: what every proof compares with, and `verify.reference=hf`.

S tokens of a prompt, H hidden_size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hs_ray.errors import ConfigError, UnsupportedError
from hs_ray.schema import CaptureSpec

LAYER_NAMES = ("layers", "h", "blocks")
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")


def load_model(folder: Path, dtype: Any, device: str, trust_remote_code: bool = False) -> Any:
    """The folder's model with its language head, or the multimodal wrapper; in eval mode.

    dtype: a torch dtype; device: "auto" spreads it over all GPUs. Raises ConfigError where transformers cannot load it.
    """
    import transformers

    placement = {"device_map": "auto"} if device == "auto" else {}
    error: Exception | None = None
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        try:
            model = auto.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code, **placement)
            return (model if placement else model.to(device)).eval()
        except (OSError, ValueError, ImportError, KeyError) as reason:
            error = error or reason
    raise ConfigError(f"{folder}: transformers cannot load it ({error})") from error


def decoder_parts(model: Any) -> tuple[Any, Any, Any]:
    """(decoder, its list of layers, its final norm). Raises UnsupportedError."""
    decoder = model.get_decoder()
    while _child(decoder, LAYER_NAMES) is None and hasattr(decoder, "model"):
        decoder = decoder.model  # Llama 4 calls its whole model the decoder
    layers = _child(decoder, LAYER_NAMES)
    norm = _child(decoder, NORM_NAMES)
    if layers is None or norm is None:
        raise UnsupportedError(
            f"{type(decoder).__name__}: no layers ({', '.join(LAYER_NAMES)}) or no final norm "
            f"({', '.join(NORM_NAMES)}) by a known name: there is no reference to compare with"
        )
    return decoder, layers, norm


def _child(module: Any, names: Sequence[str]) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


class Reference:
    """Hooks on the layers and the final norm of a loaded model. Raises ConfigError if it is another than the spec's,
    UnsupportedError if its decoder has no layers or no final norm that we can find."""

    def __init__(self, model: Any, spec: CaptureSpec):
        self._decoder, layers, norm = decoder_parts(model)
        if len(layers) != spec.num_hidden_layers:
            raise ConfigError(f"transformers' model has {len(layers)} decoder layers, not {spec.num_hidden_layers}")
        self._columns = spec.columns
        self._caught: dict[str, npt.NDArray[np.float32]] = {}
        for i in range(spec.num_hidden_layers):
            layers[i].register_forward_pre_hook(self._input_hook(f"hidden_{i}"), with_kwargs=True)
        for name in (f"hidden_{spec.num_hidden_layers}", "final_pre_norm"):
            norm.register_forward_pre_hook(self._input_hook(name), with_kwargs=True)
        norm.register_forward_hook(lambda module, args, output: self._keep("final_post_norm", output))

    def _input_hook(self, name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(name, args[0] if args else kwargs["hidden_states"])

        return hook

    def _keep(self, name: str, state: Any) -> None:
        if name in self._columns:  # copied: layers add in place
            self._caught[name] = state.detach().reshape(-1, state.shape[-1]).to("cpu", copy=True).float().numpy()

    def states(self, input_ids: npt.NDArray[np.integer]) -> dict[str, npt.NDArray[np.float32]]:
        """int [S] -> float32 [S, H] by column of the spec."""
        import torch

        self._caught = {}
        device = next(self._decoder.parameters()).device
        with torch.no_grad():
            self._decoder(input_ids=torch.from_numpy(input_ids.astype(np.int64))[None].to(device), use_cache=False)
        return {name: self._caught[name] for name in self._columns}
