"""The safetensors files of a model folder: which there are, whether they are whole, what they hold. None is loaded."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hs_ray.errors import ConfigError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAMPLED_BLOCKS, SAMPLED_BYTES = 16, 4096  # of each file, for the digest


def weight_files(folder: Path, name: str) -> list[Path]:
    """The files that the index names, or all. Raises ConfigError for none, or one that is missing."""
    index = read_index(folder)
    files = sorted({folder / file for file in index.values()} if index else folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"model.path = {name}: {len(missing)} weight files are missing, the first is {missing[0]}; "
            f"fetch the model again"
        )
    if not files:
        raise ConfigError(
            f"model.path = {name}: {folder} has no *.safetensors; other formats run code when read, convert them"
        )
    return files


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty for a model in a single file."""
    path = folder / INDEX
    weight_map: dict[str, str] = json.loads(path.read_bytes())["weight_map"] if path.is_file() else {}
    return weight_map


def read_header(path: Path, name: str) -> tuple[dict[str, Any], int]:
    """({tensor name: dtype, shape, data_offsets}, offset of the data). Raises ConfigError if the file is cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= size else b""
    try:
        header = {key: entry for key, entry in json.loads(text).items() if key != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        header, end = {}, -1
    if 8 + length + end != size:
        raise ConfigError(
            f"model.path = {name}: {path.name} is damaged or cut off ({size} bytes); fetch the model again"
        )
    return header, 8 + length


def tensor_files(folder: Path, name: str) -> dict[str, str]:
    """Tensor name -> file name, for every tensor of the model."""
    index = read_index(folder)
    return index or {key: path.name for path in weight_files(folder, name) for key in read_header(path, name)[0]}


def content_digest(folder: Path, name: str) -> str:
    """sha256 over name, size, header and some blocks of every weight file.

    Blocks too, because the headers of a model and of its fine-tuned copy are equal; some, because reading all of 1 TB
    would take longer than the check is worth.
    """
    digest = hashlib.sha256()
    for path in weight_files(folder, name):
        header, data_start = read_header(path, name)
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size, header], sort_keys=True).encode())
        with path.open("rb") as file:
            for block in range(SAMPLED_BLOCKS):
                file.seek(data_start + (size - data_start) * block // SAMPLED_BLOCKS)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def norm_digest(weight: "torch.Tensor", eps: float, kind: str) -> str:
    """sha256 over a final norm, [H] of any dtype: what `_run/final_norm.safetensors` says of itself as `sha256`.

    No state is checked by that file's weight, so that a flipped bit in it would show nowhere else.
    """
    import torch

    digest = hashlib.sha256(json.dumps([str(weight.dtype), list(weight.shape), eps, kind]).encode())
    digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
