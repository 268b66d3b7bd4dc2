"""What is to be proven, and where: plain values that travel to the proof's own process as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hs_ray.errors import ConfigError, UnsupportedError
from hs_ray.prove.proofs import Key

FOLDER_PREFIX = "hs_ray-prove-"  # of a proof's temporary folder


@dataclass(frozen=True)
class Request:
    config: dict[str, Any]  # the model's config.json
    release: str
    device: str  # cpu or cuda
    tp_size: int = 1
    attention_backend: str | None = None
    code: str | None = None  # folder with the model's own Python code; None: it is not run
    seed: int = 0
    args: dict[str, Any] = field(default_factory=dict)  # further SGLang server arguments

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or []
        if not names:
            raise UnsupportedError("config.json names no architecture; a causal LM is needed")
        return str(names[0])

    @property
    def key(self) -> Key:
        return Key(self.architecture, self.release, self.device, self.tp_size > 1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        return cls(**json.loads(text))


def read_config(folder: str) -> dict[str, Any]:
    """config.json of a model folder. Raises ConfigError."""
    try:
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {folder}: config.json cannot be read ({error})") from error
    return config


def from_options(options: Any) -> Request:
    """options: EngineOptions of the engine that is to start."""
    return Request(
        config=read_config(options.model_path),
        release=options.release,
        device=options.device,
        tp_size=options.tp_size,
        attention_backend=options.attention_backend,
        code=options.model_path if options.trust_remote_code else None,
    )


def request_for(job: Any, model: Any, release: str) -> Request:
    """job: ProveJob; model: ModelInfo. The device is chosen by what this process sees."""
    device = job.engine.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Request(
        config=read_config(model.path),
        release=release,
        device=device,
        tp_size=job.engine.tp_size,
        attention_backend=job.engine.attention_backend,
        code=model.path if job.model.trust_remote_code else None,
        seed=job.prove.seed,
        args=dict(job.engine.args),
    )
