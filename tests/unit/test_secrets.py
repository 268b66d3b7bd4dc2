"""Credentials come from the environment and go nowhere: not into configuration, messages, plan, run.json or report.

What a whole run writes and logs is searched in tests/integration/test_submit_jobs.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from make_output import make_output
from s3 import Bucket

from hs_ray.config import ExtractJob, load
from hs_ray.errors import ConfigError
from hs_ray.inputs import iter_chunk, list_sources, split_sources
from hs_ray.manifest import build_manifest
from hs_ray.plan import build_plan, fingerprint, load_run, resolve, write_run
from hs_ray.report import write_report
from hs_ray.storage import open_storage
from hs_ray.submit.cli import make_run, parse

ROOT = Path(__file__).parents[2]
PLANTED = "wJalrXUtnFEMI-planted-4f1d"
NAMES = ["secret", "key", "aws_secret_access_key", "client_kwargs.aws_session_token", "password", "sas_token", "auth"]


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_as_an_option_is_refused_and_not_repeated(name: str) -> None:
    overrides = ["output.path=s3://bucket/hs", f"+output.storage_options.{name}={PLANTED}"]
    for read in (lambda: load(ExtractJob, "extract", overrides), lambda: make_run(parse(overrides), ROOT)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert PLANTED not in str(caught.value) and "looks like a secret" in str(caught.value)


def test_nor_by_the_job_itself() -> None:
    job = [
        sys.executable,
        str(ROOT / "jobs/extract.py"),
        "output.path=s3://b/hs",
        f"+output.storage_options.key={PLANTED}",
    ]
    done = subprocess.run(job, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert PLANTED not in done.stdout + done.stderr


def test_credentials_of_s3_are_in_no_object(s3: Bucket, monkeypatch: pytest.MonkeyPatch, tiny_random: Path) -> None:
    """Plan, run.json, manifest and report, written with a secret in the environment, hold nothing of it."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    monkeypatch.setenv("AWS_SESSION_TOKEN", PLANTED)
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    options = [f"+output.storage_options.{name}={value}" for name, value in s3.options.items()]
    job = load(ExtractJob, "extract", ["model=tiny_random", f"output.path={s3.url}", "input.limit=5", *options])
    resolved, sources = resolve(job), list_sources(job.input)
    storage = open_storage(str(job.output.path), job.output.storage_options)
    tables = (table for chunk in split_sources(sources) for table in iter_chunk(chunk, resolved.tokenize_settings))
    summary = build_plan(storage, tables, resolved)
    run = write_run(
        storage, resolved, summary, sources, fingerprint(resolved, sources, {"sglang": "0"}), {"sglang": "0"}
    )
    build_manifest(storage, run, {})
    write_report(storage)
    assert load_run(storage) is not None
    folders = ("", "_run", "_run/samples", "_rejects")
    contents = [storage.read_bytes(info.path) for folder in folders for info in storage.list(folder)]
    assert len(contents) >= 4
    assert not [content[:100] for content in contents if PLANTED.encode() in content]


def test_a_report_shows_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", PLANTED)
    made = make_output(tmp_path / "out")
    write_report(open_storage(str(made.path)))
    assert PLANTED not in (made.path / "_run/report.html").read_text()
