"""The model as the rest of the job sees it: what its config.json says, its tokenizer, its final norm.

Nothing here loads the model: one of 1 T parameters is described in seconds, on a machine without a GPU.
"""

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hs_ray.builtin_models import PREFIX, builtin_folder
from hs_ray.config import ModelConfig
from hs_ray.errors import ConfigError, UnsupportedError
from hs_ray.weights import SINGLE, content_digest, tensor_files, weight_files

if TYPE_CHECKING:
    import torch

# What a hub model is described by; its weights are fetched where an engine runs, not on the driver.
METADATA_PATTERNS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
TOKENIZER_FILES = (
    "tokenizer", "tokenization_", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges", "tiktoken",
    "spiece", "sentencepiece", "tekken",
)  # fmt: skip
CONTEXT_KEYS = (
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings", "n_positions",
)  # fmt: skip

NORM_KEY = re.compile(r"(^|\.)(norm|final_norm|ln_f|norm_f|final_layernorm|final_layer_norm)\.weight$")
# Not a norm inside a layer, of a vision or audio tower, or of a multi-token-prediction head.
OTHER_NORM = re.compile(r"\.\d+\.|(^|\.)(vision|visual|audio|mtp|vpm|mm_|multi_modal|embed_vision)")
# Model types whose final norm multiplies by 1 + weight; tests/unit/test_model.py compares it with transformers.
PLUS_ONE_NORMS = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "minimax_m3_vl", "minimax_m3_vl_text", "muse_glimmer",
    "muse_glimmer_text", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp",
    "qwen4_exp_text", "recurrent_gemma", "step3p5", "step3p7", "vaultgemma",
})  # fmt: skip


@dataclass(frozen=True)
class ModelInfo:
    """Plain values, so that it goes into run.json and through Ray as it is."""

    name: str  # as the user spelt it
    path: str  # local folder; of a hub model its metadata only, see `local_weights`
    revision: str | None  # the hub commit; None for a folder
    architecture: str  # architectures[0] of config.json
    num_hidden_layers: int  # N
    hidden_size: int  # H
    vocab_size: int
    context_length: int
    digest: str
    tokenizer_path: str


def resolve_model(config: ModelConfig, weights: bool = True) -> ModelInfo:
    """Find the model and read what its config says.

    Another node calls it again: the path may differ from node to node, the digest does not.
    weights=False: they need not be there (a dry run, a task that tokenizes), and the digest is of config.json alone.
    Raises ConfigError (no such folder, a cut-off file, ...) or UnsupportedError (not a decoder that can be captured).
    """
    folder, revision = _locate("model.path", config.path, config.revision)
    raw = _read_config(folder, config.path)
    architectures = raw.get("architectures") or []
    if not architectures:
        raise UnsupportedError(
            f"model.path = {config.path}: its config.json names no architecture; a causal LM is needed"
        )
    if raw.get("is_encoder_decoder"):
        raise UnsupportedError(f"model.path = {config.path}: {architectures[0]} has an encoder; a causal LM is needed")
    text = _text_config(raw, folder, config)
    tokenizer = folder if config.tokenizer is None else _locate("model.tokenizer", config.tokenizer, None)[0]
    return ModelInfo(
        name=config.path,
        path=str(folder),
        revision=revision,
        architecture=str(architectures[0]),
        num_hidden_layers=int(text["num_hidden_layers"]),
        hidden_size=int(text["hidden_size"]),
        vocab_size=int(text["vocab_size"]),
        context_length=_context_length(text, config.path),
        digest=model_digest(str(folder), config.path, revision, weights),
        tokenizer_path=str(tokenizer),
    )


def model_digest(folder: str, name: str, revision: str | None, weights: bool = True) -> str:
    """Of config.json and the weights: of their content, or for a hub model of the commit. Equal on every node."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    if weights:
        digest.update((revision or content_digest(Path(folder), name)).encode())
    return digest.hexdigest()


def local_weights(info: ModelInfo) -> str:
    """The folder to load the model from, on the node that calls it; fetches a hub model's weights at its commit."""
    if info.revision is None:
        return info.path
    folder = _download("model.path", info.name, info.revision, [*METADATA_PATTERNS, "*.safetensors"])
    weight_files(folder, info.name)  # raises if the cache holds only a part
    return str(folder)


def _locate(key: str, name: str, revision: str | None) -> tuple[Path, str | None]:
    """A builtin, a local folder or a hub name -> (local folder, hub commit or None)."""
    folder = builtin_folder(name) if name.startswith(PREFIX) else Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"model.revision = {revision}: only for hub names, and {name} is a folder; leave it out")
        return folder.resolve(), None
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{key} = {name}: no such folder here; give a folder, or a hub name such as Qwen/Qwen3-8B")
    snapshot = _download(key, name, revision, METADATA_PATTERNS)
    return snapshot, snapshot.name  # the cache names a snapshot's folder after its commit


def _download(key: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    failures = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except failures as error:
        with contextlib.suppress(*failures):  # no network: what is in the cache will do
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{key} = {name}: no such folder here, and as a hub name{at} it cannot be had "
            f"({type(error).__name__}: {_first_line(error)}); check spelling and network, or give a local folder"
        ) from error


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"model.path = {name}: {folder} has no config.json; give a Hugging Face model folder"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"model.path = {name}: its config.json is not JSON ({error}); fetch the model again"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"model.path = {name}: its config.json is not a JSON object; fetch the model again")
    return raw


# Names that the language model's part of a multimodal config has.
TEXT_PARTS = ("text_config", "llm_config", "language_config")


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal wrapper's config (Kimi-K2.5, Gemma 3, ...), else the config itself."""
    return next((raw[name] for name in TEXT_PARTS if isinstance(raw.get(name), dict) and raw[name]), raw)


def _text_config(raw: dict[str, Any], folder: Path, config: ModelConfig) -> dict[str, Any]:
    """`text_part`, with what the file leaves out because it is the default of its class in transformers."""
    needed = ("num_hidden_layers", "hidden_size", "vocab_size")
    text = text_part(raw)
    if not all(isinstance(text.get(key), int) for key in needed):
        from transformers import AutoConfig

        try:
            decoder = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code).get_text_config(
                decoder=True
            )
        except (ValueError, KeyError, OSError) as error:
            raise UnsupportedError(
                f"model.path = {config.path}: its config.json is not understood ({_first_line(error)})"
            ) from error
        # Attributes, not to_dict(): GPT-2's n_layer answers to num_hidden_layers.
        text = decoder.to_dict() | {key: getattr(decoder, key, None) for key in needed}
    missing = [key for key in needed if not isinstance(text.get(key), int)]
    if missing:
        raise UnsupportedError(f"model.path = {config.path}: its config.json does not give {', '.join(missing)}")
    return text


def _context_length(text: dict[str, Any], name: str) -> int:
    """Longest sequence, by SGLang's rule: a RoPE factor counts unless the length has it already."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = rope.get("factor") or 1
    if "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3":
        factor = 1
    for key in CONTEXT_KEYS:
        if isinstance(text.get(key), int):
            return int(factor * text[key])
    raise UnsupportedError(f"model.path = {name}: its config.json gives no context length (max_position_embeddings)")


def load_tokenizer(info: ModelInfo, config: ModelConfig) -> Any:
    """The transformers tokenizer, with `model.chat_template` in place of its own template where one is given."""
    from transformers import AutoTokenizer

    template = chat_template(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(info.tokenizer_path, trust_remote_code=config.trust_remote_code)
    except (ValueError, OSError, ImportError, KeyError) as error:
        what = f"model.tokenizer = {config.tokenizer}" if config.tokenizer else f"model.path = {config.path}"
        trust = (
            "" if config.trust_remote_code else "; if it is Python code that you trust, model.trust_remote_code=true"
        )
        raise ConfigError(f"{what}: its tokenizer cannot be loaded ({_first_line(error)}){trust}") from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def chat_template(config: ModelConfig) -> str | None:
    """The text of the file `model.chat_template`; None where the tokenizer's own is used."""
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template = {config.chat_template}: a file with a Jinja template ({_first_line(error)})"
        ) from error


def tokenizer_digest(info: ModelInfo, config: ModelConfig) -> str:
    """sha256 over the tokenizer's files and, where one is given, the chat template that replaces its own."""
    digest = _files_digest(_tokenizer_files(info))
    digest.update(b"\0template\0" + (chat_template(config) or "").encode())
    return digest.hexdigest()


def tokenizer_files_digest(info: ModelInfo) -> str:
    """sha256 over those of the tokenizer's files that every node has: of a hub's, one node may hold more than is
    fetched here."""
    shared = [file for file in _tokenizer_files(info) if any(file.match(pattern) for pattern in METADATA_PATTERNS)]
    return _files_digest(shared).hexdigest()


def _tokenizer_files(info: ModelInfo) -> list[Path]:
    return [
        path
        for path in sorted(Path(info.tokenizer_path).iterdir())
        if path.is_file() and (path.name.startswith(TOKENIZER_FILES) or path.suffix in (".model", ".tiktoken"))
    ]


def _files_digest(files: list[Path]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest


def final_norm(info: ModelInfo) -> tuple["torch.Tensor", float, str]:
    """(weight [H] as stored, eps, kind) of the norm after the last layer: turns a pre-norm state into a post-norm one.

    kind: rms_norm, rms_norm_plus_one (Gemma's: x * (1 + weight)) or layer_norm (without bias).
    Raises UnsupportedError for a norm that these three do not describe.
    """
    from safetensors import safe_open

    text = text_part(_read_config(Path(info.path), info.name))
    files = _norm_files(info)
    keys = [key for key in files if NORM_KEY.search(key) and not OTHER_NORM.search(key)]
    if len(keys) != 1:
        raise UnsupportedError(
            f"model.path = {info.name}: one tensor should be the final norm, these look like it: {keys}"
        )
    path = Path(info.path) / files[keys[0]]
    if not path.is_file():  # of a hub model only this one file is fetched
        path = _download("model.path", info.name, info.revision, [files[keys[0]]]) / files[keys[0]]
    with safe_open(path, framework="pt") as tensors:
        weight = tensors.get_tensor(keys[0])
    if tuple(weight.shape) != (info.hidden_size,):
        raise UnsupportedError(
            f"model.path = {info.name}: {keys[0]} has shape {list(weight.shape)}, not [{info.hidden_size}]"
        )
    model_type = str(text.get("model_type"))
    if keys[0].removesuffix("weight") + "bias" in files or model_type == "nemotron":
        raise UnsupportedError(
            f"model.path = {info.name}: the final norm of {model_type} is a LayerNorm with more than a weight, "
            f"which pre_norm readers could not apply; use capture.final=post_norm"
        )
    return weight, *_eps_and_kind(text, model_type, info)


def _norm_files(info: ModelInfo) -> dict[str, str]:
    """Tensor name -> file name, from the index alone where a hub model's weights are not here."""
    folder = Path(info.path)
    if info.revision is not None and not (folder / SINGLE).is_file():
        _download("model.path", info.name, info.revision, [SINGLE])  # nothing to fetch for a model in several files
    return tensor_files(folder, info.name)


def _eps_and_kind(text: dict[str, Any], model_type: str, info: ModelInfo) -> tuple[float, str]:
    rms = "rms_norm_plus_one" if model_type in PLUS_ONE_NORMS else "rms_norm"
    names = {"rms_norm_eps": rms, "layer_norm_eps": "layer_norm", "layer_norm_epsilon": "layer_norm"}
    for name, kind in names.items():
        if name in text:
            return float(text[name]), kind

    from transformers import AutoConfig  # the file leaves out the default of its class

    decoder = AutoConfig.from_pretrained(info.path).get_text_config(decoder=True)
    for name, kind in names.items():
        if isinstance(getattr(decoder, name, None), float):
            return float(getattr(decoder, name)), kind
    raise UnsupportedError(f"model.path = {info.name}: config.json of {model_type} gives no eps of the final norm")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
