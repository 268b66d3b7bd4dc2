"""The arguments of jobs/submit.py: a few of its own, and the job's, which are checked here and passed on."""

import argparse
import secrets
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hs_ray.config import ExtractJob, load
from hs_ray.errors import ConfigError, UserError
from hs_ray.submit.again import Run, run_until_done
from hs_ray.submit.client import JobServer, job_server

INTERRUPTED = 130


def parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python jobs/submit.py",
        description="Submit jobs/extract.py to a Ray cluster, follow it, and submit it again while it makes progress. "
        "Ends with the job's own exit code.",
    )
    parser.add_argument("job", nargs="*", metavar="KEY=VALUE", help="of jobs/extract.py")
    parser.add_argument("--address", help="the dashboard; default RAY_API_SERVER_ADDRESS, RAY_ADDRESS, this machine's")
    parser.add_argument("--runtime-env", type=Path, help="jobs/runtime_env.yaml installs what the image lacks")
    parser.add_argument("--attempts", type=int, default=10, help="at most (default 10)")
    parser.add_argument("--wait", type=float, default=900, help="seconds for a silent cluster (default 900)")
    return parser.parse_args(args)


def make_run(options: argparse.Namespace, checkout: Path | None) -> Run:
    """What to submit. checkout: a clone to upload; None where hs_ray is installed on the cluster.

    Raises ConfigError for what the job itself would refuse, and for paths that mean nothing on another machine.
    """
    job = load(ExtractJob, "extract", options.job)
    output = job.output.path or ""
    if "://" not in output and not Path(output).is_absolute():
        raise ConfigError(
            f"output.path = {output or 'null'}: an absolute path or s3://bucket/prefix; a job's own folder is temporary"
        )
    if options.attempts < 1:
        raise ConfigError(f"--attempts = {options.attempts}: 1 or more")
    runtime_env: dict[str, Any] = {}
    if options.runtime_env is not None:
        if not options.runtime_env.is_file():
            raise ConfigError(f"--runtime-env = {options.runtime_env}: no such file; for example jobs/runtime_env.yaml")
        loaded: Any = OmegaConf.to_container(OmegaConf.load(options.runtime_env))
        runtime_env = dict(loaded)
    script = ["python", "-m", "hs_ray", "extract"]
    if checkout is not None:
        runtime_env["working_dir"] = str(checkout)
        script = ["python", "jobs/extract.py"]
    return Run(
        name=f"hs_ray-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        entrypoint=shlex.join([*script, *options.job]),
        runtime_env=runtime_env,
        output=output,
        storage_options=dict(job.output.storage_options),
        attempts=options.attempts,
        wait_s=options.wait,
        lease_s=job.cluster.lease_seconds,
    )


def main(args: Sequence[str], checkout: Path | None) -> int:
    """Returns the exit code; a UserError is one message on stderr and 2, as in every job."""
    options = parse(args)
    try:
        run = make_run(options, checkout)
        server = JobServer(job_server(options.address))
        return run_until_done(server, run, echo=lambda text: print(text, flush=True), say=_say)
    except UserError as error:
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        _say("not followed any more; the job goes on: ray job logs -f, ray job stop")
        return INTERRUPTED


def _say(text: str) -> None:
    print(f"submit: {text}", flush=True)
