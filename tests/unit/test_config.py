"""The command line: what is accepted, and the exact text for what is not."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from hs_ray.config import (
    BenchJob,
    Compression,
    DescribeJob,
    ExportJob,
    ExtractJob,
    Final,
    ProveJob,
    VerifyJob,
    check,
    load,
    parse_bytes,
    run_job,
    to_plain,
)
from hs_ray.errors import ConfigError
from hs_ray.schema import resolve_layers

ROOT = Path(__file__).parents[2]
ENGINE_KEYS = (
    "device, tp_size, replicas, chunked_prefill_size, mem_fraction_static, attention_backend, max_inflight_tokens, args"
)
NO_ENGINE_KEY = f"no such key; keys of engine: {ENGINE_KEYS}; new keys are accepted only under engine.args and output.storage_options"
HIDDEN = "(hidden): looks like a secret, and the configuration is written to run.json; give credentials through the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, a role)"
NO_OPTION = "not a KEY=VALUE; options are --help, and --cfg job (print the configuration and stop), with --resolve"

REFUSED = {
    # misspelt keys: the same text however they are added
    "engine.typo=1": f"engine.typo = 1: {NO_ENGINE_KEY}",
    "+engine.typo=1": f"engine.typo = 1: {NO_ENGINE_KEY}",
    "++engine.typo=1": f"engine.typo = 1: {NO_ENGINE_KEY}",
    "+engine.typo.deep=1": f"engine.typo.deep = 1: {NO_ENGINE_KEY}",
    "max_seq_length=1": "max_seq_length = 1: no such key; keys: layers, max_seq_len, on_too_long, dry_run, model, engine, capture, input, output, cluster",
    "capture.layers=[1]": "capture.layers = [1]: no such key; keys of capture: final, canary, prove",
    # wrong types
    "max_seq_len=abc": "max_seq_len = abc: a whole number, longest sample in tokens, at most the model's context",
    "max_seq_len=1.5": "max_seq_len = 1.5: a whole number, longest sample in tokens, at most the model's context",
    "max_seq_len=null": "max_seq_len = null: a whole number, longest sample in tokens, at most the model's context",
    "max_seq_len=???": "max_seq_len = ???: a whole number, longest sample in tokens, at most the model's context",
    "capture.canary=maybe": "capture.canary = maybe: true or false, check every engine before its first unit",
    "capture.final=prenorm": "capture.final = prenorm: the state after the last layer: pre_norm, post_norm, both or none",
    "input.max_rejected=many": "input.max_rejected = many: a number, stop before the engine starts if a larger share of the lines is rejected",
    "engine.tp_size=[1]": "engine.tp_size = [1]: a whole number, GPUs of one engine (tensor parallelism)",
    "engine=big": "engine = big: a group of keys; set them one by one, for example engine.device=VALUE",
    "engine.args=3": "engine.args = 3: set it name by name, +engine.args.NAME=VALUE, any other SGLang server argument: +engine.args.NAME=VALUE",
    "layers=1,2": "layers = 1,2: eagle3, a list of layer ids, or all",
    # what is no KEY=VALUE
    "layers=[3": "layers = [3: not understood (no viable alternative at input '[3'); a list is [a,b]; quote it for the shell: 'layers=[a,b]'",
    "max_seq_len": f"max_seq_len: {NO_OPTION}",
    "~engine.tp_size": f"~engine.tp_size: {NO_OPTION}",
    "--multirun": f"--multirun: {NO_OPTION}",
    "=3": f"=3: {NO_OPTION}",
    # values out of range
    "max_seq_len=0": "max_seq_len = 0: a whole number of tokens, 1 or more; for example max_seq_len=8192",
    "model.dtype=float16": "model.dtype = float16: bfloat16, the one dtype that states are stored in; leave it out",
    "engine.device=tpu": "engine.device = tpu: auto, cuda or cpu",
    "engine.tp_size=0": "engine.tp_size = 0: a whole number of GPUs, 1 or more",
    "engine.replicas=two": "engine.replicas = two: auto, or a whole number of engines, 1 or more",
    "engine.replicas=true": "engine.replicas = True: auto, or a whole number of engines, 1 or more",
    "engine.max_inflight_tokens=0": "engine.max_inflight_tokens = 0: auto, or a whole number of tokens, 1 or more",
    "engine.chunked_prefill_size=0": "engine.chunked_prefill_size = 0: null, a whole number of tokens, or -1 for no splitting",
    "engine.mem_fraction_static=1": "engine.mem_fraction_static = 1.0: null, or a share between 0 and 1; for example 0.8",
    "input.max_rejected=2": "input.max_rejected = 2.0: a share from 0 to 1; for example 0.01",
    "input.max_rejected=nan": "input.max_rejected = nan: a share from 0 to 1; for example 0.01",
    "input.limit=0": "input.limit = 0: null, or 1 or more lines",
    "input.path=x.jsonl": "output.path = null: a folder or s3://bucket/prefix; say where the states of this input go",
    "output.node_path=nvme": "output.node_path = nvme: null, or an absolute path on every node; variables are allowed",
    "output.shard_bytes=lots": "output.shard_bytes = lots: a size such as 1GiB, 500MB or 1048576",
    "output.min_free_bytes=-1": "output.min_free_bytes = -1: a size of 0 or more",
    "cluster.prefetch_units=0": "cluster.prefetch_units = 0: auto, or a whole number of units, 1 or more",
    "cluster.lease_seconds=0": "cluster.lease_seconds = 0.0: 1 or more",
    # keys that are ours
    "+engine.args.disable_radix_cache=false": "engine.args.disable_radix_cache = False: the prefix cache must stay off: it skips the tokens it knows, and their states would be missing",
    "+engine.args.disable_prefill_cuda_graph=false": "engine.args.disable_prefill_cuda_graph = False: prefill runs eagerly: a replayed graph passes the hooks by and pads the batch; it gains nothing at full batches",
    "+engine.args.cuda-graph-backend-prefill=full": "engine.args.cuda-graph-backend-prefill = full: prefill runs eagerly: a replayed graph passes the hooks by and pads the batch; it gains nothing at full batches",
    "+engine.args.tp_size=2": "engine.args.tp_size = 2: set by engine.tp_size; use that key",
    "+engine.args.tensor-parallel-size=2": "engine.args.tensor-parallel-size = 2: set by engine.tp_size; use that key",
    "+engine.args.port=30000": "engine.args.port = 30000: no server is run: the engine lives inside a Ray actor",
    # secrets: never repeated
    "+output.storage_options.secret=hunter2": f"output.storage_options.secret = {HIDDEN}",
    "+output.storage_options.key=hunter2": f"output.storage_options.key = {HIDDEN}",
    "+output.storage_options.client_kwargs.aws_session_token=hunter2": f"output.storage_options.client_kwargs.aws_session_token = {HIDDEN}",
    "+output.storage_options.endpoint_url=http://me:hunter2@host": f"output.storage_options.endpoint_url = {HIDDEN}",
    "output.storage_options={secret:hunter2}": "output.storage_options = (hidden): set it name by name, +output.storage_options.NAME=VALUE, for s3://: endpoint_url, anon, ...; credentials come from the environment",
    "+output.storage_options.secret=[hunter2": "output.storage_options.secret = (hidden): not understood; a list is [a,b]; quote it for the shell: 'output.storage_options.secret=[a,b]'",
}  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_refused_with_this_text(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ExtractJob, "extract", [override])
    assert str(caught.value) == REFUSED[override]
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("job", "override", "told"),
    [
        (VerifyJob, "verify.device=tpu", "verify.device = tpu: auto, cuda or cpu"),
        (VerifyJob, "verify.seed=-1", "verify.seed = -1: 0 or more"),
        (VerifyJob, "verify.samples=0", "verify.samples = 0: 1 or more"),
        (ExportJob, "export.workers=0", "export.workers = 0: 1 or more"),
        (ProveJob, "prove.seed=-1", "prove.seed = -1: 0 or more"),
    ],
)
def test_values_that_other_jobs_refuse(job: type, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(job, override.partition(".")[0], [override])
    assert str(caught.value) == told


def test_all_problems_of_spelling_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(ExtractJob, "extract", ["engine.typo=1", "max_seq_len=abc", "--fast"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "engine.typo = 1", "max_seq_len = abc", "--fast"
    ]  # fmt: skip


def test_all_problems_of_meaning_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            ExtractJob,
            "extract",
            ["max_seq_len=0", "engine.tp_size=0", "model.dtype=float32", "cluster.max_retries=-1"],
        )
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == [
        "max_seq_len", "model.dtype", "engine.tp_size", "cluster.max_retries"
    ]  # fmt: skip


def test_presets_that_do_not_exist_are_listed() -> None:
    with pytest.raises(
        ConfigError, match=r"^model = nope: no such preset; there are: .*kimi_k25, .*smollm2, tiny_random$"
    ):
        load(ExtractJob, "extract", ["model=nope"])
    with pytest.raises(ConfigError, match=r"^experiment = nope: no such preset; there are: .*kimi_k25_8gpu"):
        load(ExtractJob, "extract", ["experiment=nope"])
    with pytest.raises(ConfigError, match=r"^model = smollm2: no such key"):  # of a job that has no model
        load(DescribeJob, "describe", ["model=smollm2"])


def test_interpolation_that_leads_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"^engine.tp_size: Interpolation key 'nope' not found$"):
        load(ExtractJob, "extract", ["engine.tp_size=${nope}"])


LAYER_TEXTS = {
    "[3,99]": "layers = [3, 99]: 99 is out of range for 30 decoder layers; ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all",
    "[]": "layers = []: ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all; for example layers=[2,15,27]",
    "[3,3]": "layers = [3, 3]: [3] given more than once; ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all",
    "[a]": "layers = ['a']: 'a' is not a whole number; ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all",
    "[1.5]": "layers = [1.5]: 1.5 is not a whole number; ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all",
    "[true]": "layers = [True]: True is not a whole number; ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all",
    "last": "layers = 'last': ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all; for example layers=[2,15,27]",
    "3": "layers = 3: ids from 0 (embeddings) to 30 (after the last layer), each once; or eagle3, or all; for example layers=[2,15,27]",
}  # fmt: skip


@pytest.mark.parametrize("value", LAYER_TEXTS)
def test_layers_refused(value: str) -> None:
    job = load(ExtractJob, "extract", [f"layers={value}"])
    with pytest.raises(ConfigError) as caught:
        resolve_layers(job.layers, 30)
    assert str(caught.value) == LAYER_TEXTS[value]


def test_layers_accepted() -> None:
    assert resolve_layers(load(ExtractJob, "extract", ["layers=[20,3,7]"]).layers, 30) == (3, 7, 20)
    assert resolve_layers(load(ExtractJob, "extract", []).layers, 61) == (2, 30, 58)
    assert resolve_layers(load(ExtractJob, "extract", ["layers=all"]).layers, 2) == (0, 1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/date=2024/a,b.jsonl",
        "/data/my file.jsonl",
        "/data/*.jsonl",
        "it's.jsonl",
        "a\\b",
        "back\\",
        "{x}",
        "a:b",
        "1e5",
    ],
)
def test_text_is_taken_as_it_is(text: str) -> None:
    job = load(ExtractJob, "extract", [f"input.path={text}", f"output.path={text}", f"model.revision={text}"])
    assert (job.input.path, job.output.path, job.model.revision) == (text, text, text)


def test_text_forms() -> None:
    job = load(ExtractJob, "extract", ["input.path=[a.jsonl,b.jsonl]", "output.path='quoted'", "model.revision=null"])
    assert job.input.path == ["a.jsonl", "b.jsonl"]
    assert job.output.path == "quoted"
    assert job.model.revision is None


def test_types_after_loading() -> None:
    job = load(
        ExtractJob, "extract", ["capture.final=both", "output.compression=split_zstd", "engine.mem_fraction_static=0.5"]
    )
    assert job.capture.final is Final.both
    assert job.output.compression is Compression.split_zstd
    assert type(job.engine.args) is dict
    assert to_plain(job)["capture"] == {"final": "both", "canary": True, "prove": "auto"}


def test_new_keys_where_they_belong() -> None:
    overrides = ["+engine.args.quantization=fp8", "engine.args.log_level=info", "+output.storage_options.anon=true",
                 "+output.storage_options.config_kwargs.signature_version=s3v4"]  # fmt: skip
    job = load(ExtractJob, "extract", overrides)
    assert job.engine.args == {"quantization": "fp8", "log_level": "info"}
    assert job.output.storage_options == {"anon": True, "config_kwargs": {"signature_version": "s3v4"}}


def test_checks_can_be_left_to_the_caller() -> None:
    assert load(ExtractJob, "extract", ["max_seq_len=0"], checked=False).max_seq_len == 0


PRESETS = sorted(path.stem for path in (ROOT / "conf/model").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads(name: str) -> None:
    job = load(ExtractJob, "extract", [f"model={name}"])
    assert job.model.path
    assert load(BenchJob, "bench", [f"model={name}"]).model == job.model


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_loads(name: str) -> None:
    job = load(ExtractJob, "extract", [f"experiment={name}"])
    assert not job.model.path.startswith("builtin:")


def test_kimi_on_eight_gpus() -> None:
    job = load(ExtractJob, "extract", ["experiment=kimi_k25_8gpu"])
    assert (job.model.path, job.engine.tp_size, job.layers, job.max_seq_len) == (
        "moonshotai/Kimi-K2.5",
        8,
        [3, 31, 59],
        8192,
    )
    assert load(ExtractJob, "extract", ["model=kimi_k25"]).engine.tp_size == 8
    changed = load(ExtractJob, "extract", ["experiment=kimi_k25_8gpu", "engine.tp_size=16", "layers=eagle3"])
    assert (changed.engine.tp_size, changed.layers) == (16, "eagle3")


def test_other_jobs() -> None:
    assert load(VerifyJob, "verify", ["output.path=/x", "verify.samples=3"]).verify.samples == 3
    assert load(ExportJob, "export", ["export.to=specforge"]).export.to == "specforge"
    assert load(BenchJob, "bench", ["bench.prompt_tokens=[128,2048]"]).bench.prompt_tokens == [128, 2048]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1GiB", 2**30), ("500MB", 500_000_000), ("1048576", 2**20), ("1.5 kib", 1536), ("2_000", 2000), ("0", 0)],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1XB", "one", "-1", "inf", "nan", "1e400"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="a size"):
        parse_bytes(text)


JOB = """
from hs_ray.config import ExtractJob, run_job
run_job(ExtractJob, "extract", lambda job: print("ran", job.output.path) or 0)
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """A job in a process of its own, from a folder that is not the repository."""
    return subprocess.run([sys.executable, "-c", JOB, *args], capture_output=True, text=True, timeout=60, cwd="/")


@pytest.mark.parametrize(
    "override", ["engine.typo=1", "+engine.typo=1", "max_seq_len=0", "max_seq_len=x", "model=nope"]
)
def test_one_message_no_traceback_exit_code_2(override: str) -> None:
    done = run(override)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ([], "outputs/demo"),
        (["input.path=x.jsonl", "dry_run=true"], "outputs/demo"),  # nothing is written: its disk is looked at
        (["input.path=x.jsonl"], None),  # `check` refuses it
        (["input.path=x.jsonl", "output.path=/out"], "/out"),
    ],
)
def test_the_demo_output_is_for_the_demo_input(
    words: list[str], path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As jobs/extract.py loads it: `plan.resolve` checks later."""
    monkeypatch.setattr(sys, "argv", ["extract.py", *words])
    seen: list[ExtractJob] = []
    with pytest.raises(SystemExit):
        run_job(ExtractJob, "extract", lambda job: seen.append(job) or 0, checked=False)
    assert seen[0].output.path == path
    assert bool(check(seen[0])) == (path is None)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_an_unwell_store_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify.py"])

    def body(job: VerifyJob) -> int:
        raise OSError(code, "shards/a: get_object: still failing after 600 s")

    with pytest.raises(SystemExit) as left:
        run_job(VerifyJob, "verify", body)
    assert left.value.code == 1
    assert capsys.readouterr().err.strip() == (
        f"verify failed: [Errno {code}] shards/a: get_object: still failing after 600 s; run the same command again"
    )


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["verify.py"])
    with pytest.raises(FileNotFoundError):
        run_job(VerifyJob, "verify", lambda job: len(Path("/nowhere").read_bytes()))


def test_run_help_and_cfg() -> None:
    assert run().stdout == "ran outputs/demo\n"
    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "engine.tp_size=1 " in shown.stdout
    assert "kimi_k25_8gpu" in shown.stdout
    printed = run("--cfg", "job", "model=qwen3_8b", "engine.tp_size=2")
    assert printed.returncode == 0
    assert "path: Qwen/Qwen3-8B" in printed.stdout
    assert "tp_size: 2" in printed.stdout
    assert run("--cfg", "job", "engine.typo=1").returncode == 2
