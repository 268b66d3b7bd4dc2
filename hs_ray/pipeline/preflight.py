"""What can be known without Ray, an engine or a GPU: the user's mistakes, all of them at once, in seconds."""

from dataclasses import dataclass
from typing import Any

from hs_ray import prove
from hs_ray.config import ExtractJob, OnExisting
from hs_ray.engine import patching
from hs_ray.errors import ConfigError, HsRayError, OutputError
from hs_ray.inputs import Source, list_sources
from hs_ray.pipeline import cluster
from hs_ray.plan import ResolvedJob, differing_keys, load_run, resolve
from hs_ray.storage import PerNodeStorage, Storage, open_storage


@dataclass(frozen=True)
class Preflight:
    """Everything that can be known without Ray, an engine or a GPU."""

    resolved: ResolvedJob
    sources: list[Source]
    versions: dict[str, str]
    storage: Storage


def preflight(job: ExtractJob) -> Preflight:
    """Check what the user gave, all problems at once. Seconds; starts nothing."""
    problems: list[str] = []
    resolved: ResolvedJob | None = None
    sources: list[Source] = []
    try:
        resolved = resolve(job)
    except ConfigError as error:
        problems += error.problems
    try:
        sources = list_sources(job.input)
    except (ConfigError, HsRayError) as error:
        problems += getattr(error, "problems", [str(error)])
    if cluster.is_temporary(job.output.path or ""):
        problems.append(
            f"output.path = {job.output.path}: an absolute path or s3://bucket/prefix; the folder that a submitted job "
            f"runs in is temporary"
        )
    patch = patching.check_installed()
    if problems or resolved is None:
        raise ConfigError(problems)
    prove.check(resolved.model.architecture, patch.release, resolved.model.name)
    storage = open_storage(job.output.path or "", job.output.storage_options)
    if job.output.node_path:
        storage = PerNodeStorage(storage, job.output.node_path)
    return Preflight(resolved, sources, patching.versions(), storage)


def existing_run(flight: Preflight, key: tuple[str, dict[str, str]]) -> dict[str, Any] | None:
    """run.json of an earlier start of the same run. Raises OutputError for another configuration's."""
    run = load_run(flight.storage)
    if run is None:
        return None
    if run["fingerprint"] != key[0]:
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
    if flight.resolved.job.output.on_existing is OnExisting.fail:
        raise OutputError(
            f"output.on_existing = fail: {flight.storage.root} holds a run already; "
            "choose another folder, or output.on_existing=resume"
        )
    return run
