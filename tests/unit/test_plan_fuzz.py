"""Good lines broken at random, through reading and planning: every line is a sample, a reject or blank, once."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from inputs_tokenizers import byte_tokenizer

from hs_ray.config import ExtractJob
from hs_ray.inputs import REJECT_CODES, iter_chunk, list_sources, split_sources
from hs_ray.inputs.chat import ChatEncoder
from hs_ray.model import ModelInfo
from hs_ray.plan import PlanSummary, ResolvedJob, build_plan, read_unit
from hs_ray.schema import REJECTED, CaptureSpec
from hs_ray.storage import Storage, open_storage

CHAT = [{"role": "user", "content": "Q \u2028"}, {"role": "assistant", "content": "Grüße, 世界 \\n"}]
GOOD = {
    "tokens": [{"input_ids": [1, 2, 299], "loss_mask": [0, 1, 1]}, {"input_ids": list(range(60))}],
    "messages": [{"messages": CHAT}, {"messages": CHAT * 2, "tools": None}],
    "conversations": [{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}],
    "text": [{"text": "plain"}, {"prompt": "p", "response": "r"}, {"prompt": "p", "completion": "c"}],
}
PIECES = [
    b"\n",
    b"\r\n",
    b"\x00",
    b'"',
    b"\\",
    b"[",
    b"{",
    b"}",
    b"]",
    b"1e999",
    b"-",
    b"null",
    b"\xff",
    b"\xed\xa0\x80",
]
PIECES += [
    b"NaN",
    b'\\ud800"',
    b"99999999999999999999",
    b"true",
    b"\xef\xbb\xbf",
    b",",
    b":",
    b"\xe2\x80\xa8",
    b'"id":',
]


def broken(line: bytes, rng: random.Random) -> bytes:
    """A few bytes taken out, put in, changed or said twice."""
    data = bytearray(line)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 8])
        action = rng.randrange(4)
        if action == 0:
            del data[at : at + length]
        elif action == 1:
            data[at:at] = rng.choice(PIECES)
        elif action == 2:
            data[at : at + length] = rng.randbytes(length)
        else:
            data[at:at] = data[at : at + length]
    return bytes(data)


def corpus(seed: int, lines: int) -> bytes:
    """A file of one format that has some of the others, ids of every kind among its lines, half of them whole."""
    rng = random.Random(seed)
    main = list(GOOD)[seed % len(GOOD)]
    made = [json.dumps(GOOD[main][0])]  # whole: a file that begins with an array is refused as a whole
    for number in range(lines):
        record = rng.choice(GOOD[main if rng.random() < 0.9 else rng.choice(list(GOOD))])
        id = rng.choice([None, f"s{number}", number + 2**64, number // 50, "2024-01-01"])
        made.append(json.dumps({"id": id} | record, ensure_ascii=rng.random() < 0.5))
    encoded = [line.encode() for line in made]
    return b"\n".join([encoded[0], *(broken(line, rng) if rng.random() < 0.5 else line for line in encoded[1:])])


def plan(folder: Path, name: str, chunk_bytes: int) -> tuple[Storage, PlanSummary]:
    job = ExtractJob(max_seq_len=50)
    job.input.path, job.output.shard_bytes = str(folder / "fuzz.jsonl"), "4000"
    model = ModelInfo("m", "/m", None, "LlamaForCausalLM", 12, 8, 300, 64, "digest", "/m")
    resolved = ResolvedJob(job, model, CaptureSpec((2,), "pre_norm", 12, 8))
    storage = open_storage(str(folder / name))
    chunks = split_sources(list_sources(job.input), chunk_bytes)
    tables = (t for chunk in chunks for t in iter_chunk(chunk, resolved.tokenize_settings, chunk_bytes))
    return storage, build_plan(storage, tables, resolved)


@pytest.mark.parametrize("seed", range(12))
def test_every_line_is_accounted_for(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ChatEncoder(byte_tokenizer("qwen3"))
    monkeypatch.setattr("hs_ray.inputs.read._encoder", lambda settings: encoder)
    data = corpus(seed, 400)
    (tmp_path / "fuzz.jsonl").write_bytes(data)
    storage, summary = plan(tmp_path, "out", 2**20)
    assert summary.lines == data.count(b"\n") + (not data.endswith(b"\n"))
    assert summary.lines == summary.samples + summary.rejected + summary.blank
    assert summary.samples and summary.rejected and set(summary.rejects_by_code) <= set(REJECT_CODES)
    samples = [s for unit in range(summary.units) for s in read_unit(storage, unit, summary.units_per_file)]
    rejects = pq.read_table(storage.open(REJECTED)).to_pylist()
    lines = [sample.line for sample in samples] + [reject["line"] for reject in rejects]
    assert len(set(lines)) == len(lines) == summary.samples + summary.rejected
    assert len({sample.sample_id for sample in samples}) == len(samples)
    for sample in samples:
        assert 0 < sample.num_tokens == len(sample.loss_mask) <= 50 and sample.loss_mask.any()
        assert sample.input_ids.min() >= 0 and sample.input_ids.max() < 300
    _, again = plan(tmp_path, "again", 500)  # other borders of chunks
    assert again == summary
    assert [p.read_bytes() for p in sorted((tmp_path / "again").rglob("*.parquet"))] == [
        p.read_bytes() for p in sorted((tmp_path / "out").rglob("*.parquet"))
    ]
