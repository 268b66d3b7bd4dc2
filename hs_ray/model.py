"""The model as the rest of the job sees it: what `config.json` and the safetensors headers say, its tokenizer, its final norm.

Nothing here loads weights: a model of 1 T parameters is described in a second, on a machine without a GPU.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hs_ray.builtin_models import PREFIX, builtin_folder
from hs_ray.config import ModelConfig
from hs_ray.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

# What a hub model is described by; weights are fetched where an engine runs, not on the driver.
METADATA_PATTERNS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
TOKENIZER_FILES = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "tiktoken", "spiece", "tokenization_")
NORM_KEY = re.compile(r"(^|\.)(norm|final_norm|ln_f|final_layernorm|final_layer_norm)\.weight$")
# Model types whose final norm multiplies by 1 + weight. tests/unit/test_model.py compares it with transformers' sources.
PLUS_ONE_NORMS = frozenset(
    "gemma gemma2 gemma3 gemma3_text minimax_m3_vl minimax_m3_vl_text muse_glimmer muse_glimmer_text qwen3_5 qwen3_5_text "
    "qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma step3p5 step3p7 vaultgemma".split()
)
SAMPLED_BLOCKS, SAMPLED_BYTES = 16, 4096  # of each weight file, for the digest


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


def resolve_model(config: ModelConfig) -> ModelInfo:
    """Find the model and read what its config says.

    Another node calls it again: a folder in the cache of one node has another path on the next, the digest is the same.
    Raises ConfigError (no such folder, cut-off file, ...) or UnsupportedError (not a decoder we can capture).
    """
    folder, revision = _locate("model.path", config.path, config.revision)
    raw = _read_config(folder, config.path)
    architectures = raw.get("architectures") or []
    if not architectures:
        raise UnsupportedError(f"model.path = {config.path}: config.json names no architecture; a causal language model is needed")
    text = _text_config(raw, folder, config)
    if raw.get("is_encoder_decoder"):
        raise UnsupportedError(f"model.path = {config.path}: {architectures[0]} has an encoder; only decoder models are captured")
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
        digest=_digest(folder, revision, config.path),
        tokenizer_path=str(tokenizer),
    )


def local_weights(info: ModelInfo) -> str:
    """The folder to load the model from, on the node that calls it. Downloads a hub model's weights at its fixed commit."""
    if info.revision is None:
        return info.path
    return str(_download("model.path", info.name, info.revision, [*METADATA_PATTERNS, "*.safetensors"]))


def _locate(key: str, name: str, revision: str | None) -> tuple[Path, str | None]:
    """A builtin, a local folder or a hub name -> (local folder, hub commit or None)."""
    folder = builtin_folder(name) if name.startswith(PREFIX) else Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"model.revision = {revision}: only hub names have revisions, {name} is a folder; leave it out")
        return folder.resolve(), None
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{key} = {name}: no such folder on this machine; give a folder or a hub name such as Qwen/Qwen3-8B")
    snapshot = _download(key, name, revision, METADATA_PATTERNS)
    return snapshot, snapshot.name  # the cache names a snapshot's folder after its commit


def _download(key: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{key} = {name}: no such folder here, and as a hub name{at} it cannot be had ({type(error).__name__}: {reason}); "
            f"check the spelling and the network, or give a local folder"
        ) from error


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"model.path = {name}: {folder} has no config.json; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigError(f"model.path = {name}: {folder}/config.json is not JSON ({error}); fetch the model again") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"model.path = {name}: {folder}/config.json is not a JSON object; fetch the model again")
    return raw


def _text_config(raw: dict[str, Any], folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The language model's part of the config. transformers is asked only where the file leaves out what its class has as default."""
    needed = ("num_hidden_layers", "hidden_size", "vocab_size")
    text = raw.get("text_config") or raw.get("llm_config") or raw
    if not all(isinstance(text.get(key), int) for key in needed):
        from transformers import AutoConfig

        try:
            whole = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
            decoder = whole.get_text_config(decoder=True)
            # attributes, not to_dict(): GPT-2's n_layer answers to num_hidden_layers
            text = decoder.to_dict() | {key: getattr(decoder, key, None) for key in needed}
        except (ValueError, KeyError, OSError) as error:
            raise UnsupportedError(f"model.path = {config.path}: its config.json is not understood: {_first_line(error)}") from error
    missing = [key for key in needed if not isinstance(text.get(key), int)]
    if missing:
        raise UnsupportedError(f"model.path = {config.path}: config.json does not give {', '.join(missing)}")
    return text


def _context_length(text: dict[str, Any], name: str) -> int:
    """Longest sequence the model was made for, by SGLang's own rule: a RoPE factor counts unless it is already in the length."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = rope.get("factor") or 1
    if "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3":
        factor = 1
    for key in ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings", "n_positions"):
        if isinstance(text.get(key), int):
            return int(factor * text[key])
    raise UnsupportedError(f"model.path = {name}: config.json gives no context length (max_position_embeddings)")


def _digest(folder: Path, revision: str | None, name: str) -> str:
    """sha256 over the model's content, not its place: config.json, and the hub commit or the weight files.

    Of each weight file: name, size, header, and some blocks spread over it, because the headers of a model and of its
    fine-tuned copy are equal. Reading all of 1 TB would take longer than the checks are worth.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if revision is not None:
        return hashlib.sha256(digest.digest() + revision.encode()).hexdigest()
    for path in _weight_files(folder, name):
        header, data_start, size = read_header(path, name)
        digest.update(f"\0{path.name}\0{size}\0".encode())
        digest.update(header)
        with path.open("rb") as file:
            for block in range(SAMPLED_BLOCKS):
                file.seek(data_start + (size - data_start) * block // SAMPLED_BLOCKS)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def _weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files that the index names, or all of them. Raises ConfigError for none, or one that is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / file for file in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"model.path = {name}: {len(missing)} weight files are missing, the first is {missing[0]}; fetch the model again")
    if not files:
        raise ConfigError(f"model.path = {name}: {folder} has no *.safetensors; other weight formats run code when read, convert them")
    return files


def read_header(path: Path, name: str) -> tuple[bytes, int, int]:
    """(JSON header, offset of the data, file size). Raises ConfigError if the file is cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size else b""
    try:
        end = max((entry["data_offsets"][1] for key, entry in json.loads(header).items() if key != "__metadata__"), default=0)
    except (ValueError, KeyError, AttributeError):
        end = -1
    if end < 0 or 8 + length + end != size:
        raise ConfigError(f"model.path = {name}: {path.name} is damaged or cut off ({size} bytes); fetch the model again")
    return header, 8 + length, size


def load_tokenizer(info: ModelInfo, config: ModelConfig) -> Any:
    """The transformers tokenizer, with `model.chat_template` in place of its own template where one is given."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(info.tokenizer_path, trust_remote_code=config.trust_remote_code)
    except (ValueError, OSError, ImportError, KeyError) as error:
        what = f"model.tokenizer = {config.tokenizer}" if config.tokenizer else f"model.path = {config.path}"
        advice = "" if config.trust_remote_code else "; if it comes with Python code that you trust, model.trust_remote_code=true"
        raise ConfigError(f"{what}: its tokenizer cannot be loaded ({_first_line(error)}){advice}") from error
    template = chat_template(config)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def chat_template(config: ModelConfig) -> str | None:
    """The text of the file `model.chat_template`, or None where the tokenizer's own is used."""
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template = {config.chat_template}: a file with a Jinja template ({_first_line(error)})") from error


def tokenizer_digest(info: ModelInfo, config: ModelConfig) -> str:
    """sha256 over the tokenizer's files and, where one is given, the chat template that replaces its own."""
    digest = hashlib.sha256()
    for path in sorted(Path(info.tokenizer_path).iterdir()):
        if path.is_file() and (path.name.startswith(TOKENIZER_FILES) or path.suffix in (".jinja", ".model", ".tiktoken")):
            digest.update(f"\0{path.name}\0".encode())
            digest.update(path.read_bytes())
    digest.update(b"\0template\0" + (chat_template(config) or "").encode())
    return digest.hexdigest()


def final_norm(info: ModelInfo) -> tuple["torch.Tensor", float, str]:
    """(weight [H] as stored, eps, kind) of the norm after the last layer: what turns a pre-norm state into a post-norm one.

    kind: rms_norm, rms_norm_plus_one (Gemma's: x * (1 + weight)) or layer_norm (without bias).
    Raises UnsupportedError for a norm that these three do not describe.
    """
    from safetensors import safe_open

    folder = Path(local_weights(info))
    raw = _read_config(folder, info.name)
    text = raw.get("text_config") or raw.get("llm_config") or raw
    found = [(path, key) for path, key in _tensors(folder, info.name) if NORM_KEY.search(key) and _is_final(key)]
    if len(found) != 1:
        raise UnsupportedError(
            f"model.path = {info.name}: {len(found)} tensors look like the final norm {[key for _, key in found]}, one is needed"
        )
    path, key = found[0]
    with safe_open(path, framework="pt") as tensors:
        weight = tensors.get_tensor(key)
        has_bias = key.removesuffix("weight") + "bias" in tensors.keys()  # noqa: SIM118  (not a dict)
    if tuple(weight.shape) != (info.hidden_size,):
        raise UnsupportedError(f"model.path = {info.name}: {key} has shape {list(weight.shape)}, not [hidden_size = {info.hidden_size}]")
    model_type = str(text.get("model_type") or raw.get("model_type"))
    if has_bias or model_type == "nemotron":
        raise UnsupportedError(f"model.path = {info.name}: the final norm of {model_type} is not described yet; capture.final=post_norm")
    if "rms_norm_eps" in text:
        return weight, float(text["rms_norm_eps"]), "rms_norm_plus_one" if model_type in PLUS_ONE_NORMS else "rms_norm"
    for eps_key in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        if eps_key in text:
            return weight, float(text[eps_key]), "layer_norm"
    return weight, *_norm_by_class(folder, info, model_type)


def _norm_by_class(folder: Path, info: ModelInfo, model_type: str) -> tuple[float, str]:
    """eps and kind where config.json leaves out a default of the class."""
    from transformers import AutoConfig

    decoder = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    if getattr(decoder, "rms_norm_eps", None) is None:
        raise UnsupportedError(f"model.path = {info.name}: config.json of {model_type} gives no rms_norm_eps")
    return float(decoder.rms_norm_eps), "rms_norm_plus_one" if model_type in PLUS_ONE_NORMS else "rms_norm"


def _tensors(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    for path in _weight_files(folder, name):
        header, _, _ = read_header(path, name)
        yield from ((path, key) for key in json.loads(header) if key != "__metadata__")


def _is_final(key: str) -> bool:
    """Not a norm inside a layer, of a vision tower or of a multi-token-prediction head."""
    return not re.search(r"\.\d+\.|(^|\.)(vision|visual|audio|mtp|vpm|mm_|multi_modal|embed_vision)", key)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
