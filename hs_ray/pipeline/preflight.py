"""What can be known without Ray, an engine or a GPU: the user's mistakes, all of them at once, in seconds."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from hs_ray import prove
from hs_ray.config import ExtractJob, OnExisting
from hs_ray.engine import patching
from hs_ray.engine.arguments import check_arguments
from hs_ray.engine.models import entry_for
from hs_ray.errors import ConfigError, OutputError
from hs_ray.inputs import Source, list_sources
from hs_ray.model import ModelInfo
from hs_ray.pipeline import cluster
from hs_ray.plan import ResolvedJob, collecting, differing_keys, load_run, resolve
from hs_ray.schema import DONE, MANIFEST, RUN_JSON, SHARDS
from hs_ray.storage import PerNodeStorage, Storage, open_storage


@dataclass(frozen=True)
class Preflight:
    """Everything that can be known without Ray, an engine or a GPU."""

    resolved: ResolvedJob
    sources: list[Source]
    versions: dict[str, str]
    storage: Storage


def preflight(job: ExtractJob) -> Preflight:
    """Check what the user gave, all problems at once (ConfigError). Seconds; starts nothing."""
    problems: list[str] = []
    versions: dict[str, str] = {}
    resolved: ResolvedJob | None = None
    sources: list[Source] = []
    storage: Storage | None = None
    with collecting(problems):
        patching.check_installed()
        versions = patching.versions()
        check_arguments(job.engine.args)
    with collecting(problems):
        resolved = resolve(job, partial(_check_supported, versions.get("sglang"), job.engine.device))
    with collecting(problems):
        sources = list_sources(job.input)
    with collecting(problems):
        storage = open_storage(job.output.path or "", job.output.storage_options)
    if job.output.path is not None and cluster.is_temporary(job.output.path):
        problems.append(
            f"output.path = {job.output.path}: an absolute path or s3://bucket/prefix; the folder that a submitted job "
            f"runs in is temporary"
        )
    if problems or resolved is None or storage is None:
        raise ConfigError(problems)
    if job.output.node_path:
        storage = PerNodeStorage(storage, job.output.node_path)
    way = entry_for(resolved.model.architecture, versions["sglang"])
    return Preflight(resolved, sources, versions | {"capture": str(way)}, storage)


def _check_supported(release: str | None, device: str, model: ModelInfo) -> None:
    """Raises UnsupportedError for a model whose states cannot be captured.

    release: of SGLang, None where none that we know is installed; device: engine.device.
    """
    if release is not None:
        prove.check(model.architecture, release, model.name, None if device == "auto" else device)


def existing_run(flight: Preflight, key: tuple[str, dict[str, str]]) -> dict[str, Any] | None:
    """run.json of an earlier start of the same run; None where there is none.

    Of another configuration's it is None too if that start committed nothing, as one whose engine could not load the
    model: `plan.supersede` it before planning. Raises OutputError for any other.
    """
    run = load_run(flight.storage)
    if run is None:
        if not _holds_nothing(flight.storage):
            raise OutputError(
                f"output.path = {flight.storage.root}: it holds shards, and no {RUN_JSON} that says which samples they "
                "are of; restore that file, or choose another folder"
            )
        return None
    on_existing = flight.resolved.job.output.on_existing
    if run["fingerprint"] != key[0]:
        if on_existing is OnExisting.resume and _holds_nothing(flight.storage):
            return None
        differing = "\n  ".join(differing_keys(run["fingerprint_parts"], key[1]))
        raise OutputError(
            f"output.path = {flight.storage.root}: made by another configuration; use it again, "
            f"or choose another folder. What differs:\n  {differing}"
        )
    node_path, given = run["config"]["output"].get("node_path"), flight.resolved.job.output.node_path
    if node_path != given:
        raise OutputError(
            f"output.node_path = {given or 'null'}: this run left its shards in {node_path or 'output.path'}; "
            f"use output.node_path={node_path or 'null'}"
        )
    if on_existing is OnExisting.fail:
        raise OutputError(
            f"output.on_existing = fail: {flight.storage.root} holds a run already; "
            "choose another folder, or output.on_existing=resume"
        )
    return run


def _holds_nothing(storage: Storage) -> bool:
    """Whether no unit was committed, and nothing looks as if one had been."""
    return not (storage.list(DONE) or storage.list(SHARDS) or storage.exists(MANIFEST))
