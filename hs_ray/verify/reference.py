"""`verify.reference=hf`: our states against transformers, on the model that run.json names.

For a random choice of samples, three arrays a column, [S, H] each: ours, transformers in fp32 (taken as the truth) and
transformers in bf16 (what rounding alone does). Two relative errors, of ours and of the bf16 run:

    norm   ||x - fp32|| / ||fp32|| over all compared tokens. A first token of extreme size can decide it.
    token  root mean square over tokens of ||x_t - fp32_t|| / ||fp32_t||: every token counts alike.

Ours may be 1.5 times the bf16 run's; of `norm`, 1.5 times the larger of the two. Where first tokens decide it, they
are one and the same token in every sample: a single draw of the rounding, which one way of computing may win by luck
(SmolLM2 on an H200: 0.0129 and 0.0030, where every other token has 0.011 both ways). A sample, a token or an element
that is far outside the noise is a problem by itself, however small its part in the means.

The final norm's file, which turns pre-norm states into post-norm ones, is compared, too: applied to the reference's own
pre-norm states it must give the reference's post-norm ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hs_ray.errors import ConfigError
from hs_ray.model import model_digest
from hs_ray.prove.reference import Reference, load_model
from hs_ray.reader import HiddenStatesDataset
from hs_ray.schema import FINAL_NORM, CaptureSpec
from hs_ray.verify.argmax import model_folder
from hs_ray.verify.norm import check_final_norm
from hs_ray.verify.report import ReferenceReport

FACTOR = 1.5  # design target, over all compared tokens
FLOOR = 0.004  # half a unit in the last place of bf16: errors below are storage
SAMPLE_FACTOR, TOKEN_FACTOR, ELEMENT_FACTOR = 3.0, 4.0, 3.0
TOKEN_FLOOR, ELEMENT_FLOOR = 0.02, 0.05


@dataclass
class Errors:
    """Of one way to compute a column, against fp32. One entry a sample in the lists."""

    squares: float = 0.0
    reference_squares: float = 0.0
    tokens: int = 0
    token_squares: float = 0.0
    samples: list[float] = field(default_factory=list)  # rms over the sample's tokens
    worst_tokens: list[float] = field(default_factory=list)
    worst_elements: list[float] = field(default_factory=list)

    def add(self, x: torch.Tensor, truth: torch.Tensor) -> None:
        """x, truth: float32 [S, H]."""
        difference = x - truth
        size = truth.norm(dim=1)
        token = difference.norm(dim=1) / size.clamp_min(1e-30)
        scale = (
            truth.abs() + (size / truth.shape[1] ** 0.5)[:, None]
        )  # an element's own size, and that of its token's others
        self.squares += float(difference.double().square().sum())
        self.reference_squares += float(truth.double().square().sum())
        self.tokens += len(truth)
        self.token_squares += float(token.double().square().sum())
        self.samples.append(float(token.double().square().mean().sqrt()))
        self.worst_tokens.append(float(token.max()))
        self.worst_elements.append(float((difference.abs() / scale.clamp_min(1e-30)).max()))

    @property
    def norm(self) -> float:
        return float((self.squares / max(self.reference_squares, 1e-300)) ** 0.5)

    @property
    def token(self) -> float:
        return float((self.token_squares / max(self.tokens, 1)) ** 0.5)


def verify_reference(
    path: str,
    *,
    samples: int = 16,
    seed: int = 0,
    device: str = "auto",
    incomplete: bool = False,
    model_path: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReferenceReport:
    """Compare `samples` random samples, all of them if there are no more. Holds the model twice: fp32 and bf16.

    model_path: another folder of the model; it may hold other files, such as a bf16 copy of an fp8 model. Raises
    ConfigError if the model's own files are no longer those of the run.
    """
    dataset = HiddenStatesDataset(path, incomplete=incomplete, rank=0, world_size=1, storage_options=storage_options)
    spec, run = dataset.output.spec, dataset.output.run
    where = model_folder(run, model_path)
    same_files = _same_files(where, run["model"], model_path is not None)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    trust = bool(run["config"]["model"].get("trust_remote_code", False))
    truth, rounded = (_reference(where, spec, dtype, device, trust) for dtype in (torch.float32, torch.bfloat16))

    chosen = np.sort(np.random.default_rng(seed).permutation(dataset.num_samples)[:samples]).tolist()
    report = ReferenceReport()
    norm, of_norm = check_final_norm(dataset.output.storage, spec, report), Errors()
    errors = {name: (Errors(), Errors()) for name in dataset.columns}
    names = []
    for number in chosen:
        sample = dataset.read(number)
        names.append((sample["sample_id"], dataset.shard_of(number).path))
        fp32, bf16 = (_states(reference, sample["input_ids"]) for reference in (truth, rounded))
        for name, (ours, theirs) in errors.items():
            ours.add(sample[name].float(), fp32[name])
            theirs.add(bf16[name], fp32[name])
        if norm is not None:
            of_norm.add(norm(fp32["final_pre_norm"]), fp32["final_post_norm"])
    report.counts = {
        "samples_compared": len(chosen),
        "tokens_compared": next(iter(errors.values()))[0].tokens if chosen else 0,
    }
    if not same_files:
        report.table = [f"note: {where} holds other files than the model that the output was made with"]
    report.table += [
        f"{'column':<16} {'output of':>10} {'error':>9} {'bf16 run':>9} {'by token':>9} {'bf16 run':>9}  worst sample"
    ]
    for name, (ours, theirs) in errors.items() if chosen else ():
        _judge(report, name, ours, theirs, names)
        worst = int(np.argmax(ours.samples))
        report.table.append(
            f"{name:<16} {_origin(name, spec):>10} {ours.norm:9.5f} {theirs.norm:9.5f} {ours.token:9.5f} "
            f"{theirs.token:9.5f}  {ours.samples[worst]:.4f} {names[worst][0]}"
        )
    _judge_norm(report, of_norm)
    return report


def _reference(where: str, spec: CaptureSpec, dtype: torch.dtype, device: str, trust_remote_code: bool) -> Reference:
    """Of the output's layers and of both final states, between which the final norm is. Raises ConfigError if the
    folder cannot be loaded or holds another model, UnsupportedError if we do not find our way in it."""
    try:
        model = load_model(Path(where), dtype, "auto" if device == "cuda" else device, trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"model_path = {error}; give the model's folder with model_path=") from error
    try:
        return Reference(model, replace(spec, final="both"))
    except ConfigError as error:
        raise ConfigError(f"model_path = {where}: {error}, with which the output was made") from error


def _states(reference: Reference, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """int64 [S] -> float32 [S, H] on the CPU, by column."""
    return {name: torch.from_numpy(state) for name, state in reference.states(input_ids.numpy()).items()}


def _same_files(where: str, model: Mapping[str, Any], chosen: bool) -> bool:
    """Whether the folder holds the files that the output was made with. chosen: by the user, so that it need not."""
    if not (Path(where) / "config.json").is_file():
        raise ConfigError(f"model_path = {where}: no model folder with a config.json there; give the model's folder")
    same = model_digest(where, model["name"], model["revision"]) == model["digest"]
    if not same and not chosen:
        raise ConfigError(
            f"model_path = null: the files in {where} are no longer those that the output was made with; "
            f"give the folder of the run's model, for example model_path=/models/the-model"
        )
    return same


def _origin(column: str, spec: CaptureSpec) -> str:
    number = column.removeprefix("hidden_")
    if not number.isdigit():
        return "norm" if column == "final_post_norm" else f"layer {spec.num_hidden_layers - 1}"
    return f"layer {int(number) - 1}" if number != "0" else "embedding"


def _judge_norm(report: ReferenceReport, errors: Errors) -> None:
    """Both sides are fp32: only the weight may be rounded, where the reference's is kept in another dtype."""
    worst = float(np.max(errors.worst_elements, initial=0.0))  # a NaN stays one
    if not worst <= FLOOR:
        detail = f"is not the model's final norm: an element of its post-norm states is {worst:.3f} off (relative)"
        report.add("norm", FINAL_NORM, f"{detail}, {FLOOR:g} allowed")


def _judge(report: ReferenceReport, column: str, ours: Errors, theirs: Errors, names: list[tuple[str, str]]) -> None:
    """`not x <= limit` everywhere: a NaN is a problem, too."""
    everywhere = f"{len(names)} samples"
    rounding = {"norm": max(theirs.norm, theirs.token), "token": theirs.token}
    for kind, noise in rounding.items():
        found, limit = getattr(ours, kind), max(FACTOR * noise, FLOOR)
        if not found <= limit:
            report.add(
                "reference",
                everywhere,
                f"column {column}: relative error ({kind}) {found:.4f}, {limit:.4f} allowed (bf16 run times {FACTOR})",
            )
    limits = {
        "sample": [SAMPLE_FACTOR * max(own, theirs.token, FLOOR) for own in theirs.samples],
        "token": [max(TOKEN_FACTOR * max(theirs.worst_tokens), TOKEN_FLOOR)] * len(names),
        "element": [max(ELEMENT_FACTOR * max(theirs.worst_elements), ELEMENT_FLOOR)] * len(names),
    }
    found_by = {"sample": ours.samples, "token": ours.worst_tokens, "element": ours.worst_elements}
    for i, (sample_id, file) in enumerate(names):
        for kind, allowed in limits.items():
            if not found_by[kind][i] <= allowed[i]:
                what = {"sample": "the sample's", "token": "one token's", "element": "one element's"}[kind]
                detail = f"{what} relative error is {found_by[kind][i]:.3f}, {allowed[i]:.3f} allowed"
                report.add("reference", file, f"sample {sample_id!r}, column {column}: {detail}")
                break
