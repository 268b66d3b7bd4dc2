"""Shared fixtures. The file also puts tests/ on the import path, so that tests share helpers such as make_output."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything of Hugging Face or Ray is imported: tests depend on no network and report to nobody.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # what Ray would choose depends on how a cluster was started

import pytest
from s3 import Bucket, S3Server

from hs_ray.builtin_models import builtin_folder, tiny_shape, write_random_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct; made once in the user's cache (half a minute)."""
    return builtin_folder("builtin:smollm2")


@pytest.fixture(scope="session")
def tiny_random() -> Path:
    """Folder of builtin:tiny_random: a random Llama of 8 layers with SmolLM2's tokenizer."""
    return builtin_folder("builtin:tiny_random")


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_tiny(LlamaConfig, num_hidden_layers=4) -> folder of a random model of that class, without a tokenizer."""

    def make(config_class: type, seed: int = 0, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(config_class.__name__.removesuffix("Config").lower())
        write_random_model(folder, config_class(**tiny_shape(**changes)), seed)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny: Callable[..., Path]) -> Path:
    """Random Llama: 8 layers, hidden size 128, vocabulary 1,024, no tokenizer."""
    from transformers import LlamaConfig

    return make_tiny(LlamaConfig)


@pytest.fixture(scope="session")
def tiny_qwen3(make_tiny: Callable[..., Path]) -> Path:
    """Random Qwen3 (norms on queries and keys): 8 layers, hidden size 128, vocabulary 1,024, no tokenizer."""
    from transformers import Qwen3Config

    return make_tiny(Qwen3Config)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto's S3 server on loopback behind the proxy that breaks requests; one for all tests."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[Bucket]:
    """A fresh bucket: `s3.storage()`, `s3.url` and `s3.options`, `s3.fault(...)`, `s3.requests`."""
    with s3_server.bucket() as bucket:
        yield bucket
