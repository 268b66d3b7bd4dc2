"""Any bytes at all: every line is a sample, a reject or blank, whatever the chunks."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from inputs_tokenizers import byte_tokenizer

from hs_ray.config import InputConfig, InputFormat
from hs_ray.inputs import TokenizeSettings, list_sources, read_chunk, split_sources
from hs_ray.inputs.chat import ChatEncoder
from hs_ray.inputs.read import BLANK, REJECT, SAMPLE

SETTINGS = TokenizeSettings(vocab_size=300, max_seq_len=50)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.integers(0, 299),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
texts = st.text(max_size=8)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": st.none() | texts},
    optional={"reasoning_content": texts, "tool_calls": json_values, "from": texts, "value": texts},
)
records = st.fixed_dictionaries(
    {},
    optional={
        "id": json_values,
        "input_ids": st.lists(st.integers(-1, 300), max_size=6) | json_values,
        "loss_mask": st.lists(st.integers(0, 1), max_size=6) | json_values,
        "messages": st.lists(turns, max_size=4) | json_values,
        "conversations": st.lists(turns, max_size=4) | json_values,
        "text": texts | json_values,
        "prompt": texts | json_values,
        "response": texts | json_values,
        "tools": json_values,
    },
)


def to_bytes(value: object) -> bytes:
    import json

    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


lines = (
    st.binary(max_size=30)
    | st.sampled_from([b"", b"\r", b" ", b"\xef\xbb\xbf", b"{", b'{"id":'])
    | records.map(to_bytes)
)
files = st.lists(lines, max_size=8).map(b"\n".join)


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ChatEncoder(byte_tokenizer("qwen3"))
    monkeypatch.setattr("hs_ray.inputs.read._encoder", lambda settings: encoder)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(data=b"\x00\n[", chunk_bytes=1, format=InputFormat.auto)  # no array, but two bad lines
@example(data=b"\t\n\x0b[{", chunk_bytes=3, format=InputFormat.text)
@given(data=files, chunk_bytes=st.integers(1, 200), format=st.sampled_from(list(InputFormat)))
def test_every_line_has_its_row(data: bytes, chunk_bytes: int, format: InputFormat) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(data)
        first = next(filter(None, (line.removeprefix(b"\xef\xbb\xbf").strip() for line in data.split(b"\n"))), b"")
        if first.startswith(b"["):
            return  # an array is refused as a whole (test_inputs_sources)
        sources = list_sources(InputConfig(path=str(path), format=format))
        whole = pa.concat_tables([read_chunk(chunk, SETTINGS) for chunk in split_sources(sources)])
        parts = pa.concat_tables([read_chunk(chunk, SETTINGS) for chunk in split_sources(sources, chunk_bytes)])
    pieces = data.split(b"\n")
    assert len(whole) == len(pieces) - (pieces[-1] == b"")
    assert parts.equals(whole)
    kinds = whole["kind"].to_numpy()
    assert ((kinds == SAMPLE) | (kinds == REJECT) | (kinds == BLANK)).all()
    for row in whole.to_pylist():
        ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"])
        assert len(ids) == len(mask) <= 50
        if row["kind"] == SAMPLE:
            assert len(ids) and ids.min() >= 0 and ids.max() < 300 and mask.any() and row["code"] is None
        else:
            assert not len(ids) and (row["code"] is not None) == (row["kind"] == REJECT)
