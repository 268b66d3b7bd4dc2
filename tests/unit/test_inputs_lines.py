"""Small files, byte by byte: what each line becomes. Vocabulary 0..99, max_seq_len 6, else the defaults."""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from hs_ray.config import InputConfig, InputFormat
from hs_ray.inputs import REJECT_CODES, TokenizeSettings, iter_chunk, list_sources, read_chunk, split_sources
from hs_ray.inputs.read import BLANK, REJECT, SAMPLE

blank = "blank"
SETTINGS = TokenizeSettings(vocab_size=100, max_seq_len=6)


def rejected(code: str, sample_id: str | None = None) -> tuple[str, str | None]:
    assert code in REJECT_CODES
    return code, sample_id


def sample(sample_id: str | None, ids: list[int], mask: list[int] | None = None, cut: bool = False) -> tuple[Any, ...]:
    return sample_id, ids, mask if mask is not None else [1] * len(ids), cut


@dataclass
class Case:
    name: str
    data: bytes
    want: list[Any]
    settings: dict[str, Any] = field(default_factory=dict)
    format: str = "tokens"


T = b'{"input_ids":[1,2]}'
t = sample(None, [1, 2])


def ids(text: str, extra: str = "") -> bytes:
    """A line of the `tokens` format with this id, as JSON source text."""
    return ('{"id":' + text + ',"input_ids":[1,2]' + extra + "}").encode()


CASES = [
    # --- lines ---
    Case("one line", T + b"\n", [t]),
    Case("last line without an end", T + b"\n" + T, [t, t]),
    Case("empty file", b"", []),
    Case("one newline is one blank line", b"\n", [blank]),
    Case("blank lines keep the count", b"\n" + T + b"\n\n  \t\n" + T + b"\n", [blank, t, blank, blank, t]),
    Case("CRLF", T + b"\r\n" + T + b"\r\n\r\n", [t, t, blank]),
    Case("CR alone ends no line", T + b"\r" + T + b"\n", [rejected("malformed_json")]),
    Case("BOM", b"\xef\xbb\xbf" + T + b"\n" + T, [t, t]),
    Case("BOM in the middle, from cat", T + b"\n\xef\xbb\xbf" + T, [t, t]),
    Case("BOM alone is blank", b"\xef\xbb\xbf\n" + T, [blank, t]),
    Case("U+2028 in a string", ids('"a\u2028b"') + b"\n" + T, [sample("a\u2028b", [1, 2]), t]),
    Case("U+2029 in a string", ids('"a\u2029b"') + b"\n" + T, [sample("a\u2029b", [1, 2]), t]),
    Case("NEL in a string", ids('"a\u0085b"') + b"\n" + T, [sample("a\u0085b", [1, 2]), t]),
    Case("U+2028 alone is no blank line", "\u2028\n".encode() + T, [rejected("malformed_json"), t]),
    Case("NUL bytes", b"\x00\x00\n" + T, [rejected("malformed_json"), t]),
    Case("spaces around", b"  " + T + b" \n", [t]),
    Case("a line of 1 MB", ids('"' + "x" * 1_000_000 + '"') + b"\n" + T, [sample("x" * 1_000_000, [1, 2]), t]),
    # --- JSON ---
    Case("cut off", b'{"input_ids":[1,2\n' + T, [rejected("malformed_json"), t]),
    Case("two values", T + T + b"\n", [rejected("malformed_json")]),
    Case("single quotes", b"{'input_ids':[1,2]}\n", [rejected("malformed_json")]),
    Case("trailing comma", b'{"input_ids":[1,2],}\n', [rejected("malformed_json")]),
    Case("NaN", b'{"input_ids":[1,2],"x":NaN}\n', [rejected("malformed_json")]),
    Case("Infinity", b'{"input_ids":[1,2],"x":-Infinity}\n', [rejected("malformed_json")]),
    Case("a number that is no double", b'{"input_ids":[1,2],"x":1e999}\n', [rejected("malformed_json")]),
    Case("a raw tab in a string", b'{"id":"a\tb","input_ids":[1,2]}\n', [rejected("malformed_json")]),
    Case("nested too deeply", b"[" * 100_000 + b"]" * 100_000 + b"\n" + T, [rejected("malformed_json"), t]),
    Case("an array", b"[1,2]\n", [rejected("not_an_object")]),
    Case("a number", b"7\n", [rejected("not_an_object")]),
    Case("null", b"null\n", [rejected("not_an_object")]),
    Case("text", b'"input_ids"\n', [rejected("not_an_object")]),
    Case("empty object", b"{}\n", [rejected("missing_key")]),
    Case("invalid UTF-8", b'{"id":"\xff","input_ids":[1,2]}\n' + T, [rejected("invalid_utf8"), t]),
    Case("overlong UTF-8", b'{"id":"\xc0\xaf","input_ids":[1,2]}\n', [rejected("invalid_utf8")]),
    Case("a surrogate in UTF-8", b'{"id":"\xed\xa0\x80","input_ids":[1,2]}\n', [rejected("invalid_utf8")]),
    Case("UTF-16", T.decode().encode("utf-16"), [rejected("invalid_utf8")]),
    Case("lone high surrogate", ids(r'"\ud83d"'), [rejected("lone_surrogate")]),
    Case("lone low surrogate", ids(r'"\ude00"'), [rejected("lone_surrogate")]),
    Case("two halves the wrong way", ids(r'"\ude00\ud83d"'), [rejected("lone_surrogate")]),
    Case("lone surrogate in a key that is not used", ids('"a"', r',"x":"\udfff"'), [rejected("lone_surrogate")]),
    Case("a whole pair", ids(r'"\ud83d\ude00"'), [sample("😀", [1, 2])]),
    Case("the same key twice", b'{"input_ids":[1,2],"input_ids":[3]}\n', [rejected("malformed_json")]),
    Case(
        "the same key twice, once escaped", b'{"input_ids":[1],"\\u0069nput_ids":[3]}\n', [rejected("malformed_json")]
    ),
    Case("two ids", b'{"id":"a","id":"b","input_ids":[1]}\n', [rejected("malformed_json")]),
    Case("escaped key", b'{"\\u0069nput_ids":[1,2]}\n', [t]),
    # --- ids ---
    Case("20 digits", ids("12345678901234567890"), [sample("12345678901234567890", [1, 2])]),
    Case("20 digits over 64 bits", ids("98765432109876543210"), [sample("98765432109876543210", [1, 2])]),
    Case("40 digits", ids("1" * 40), [sample("1" * 40, [1, 2])]),
    Case("negative", ids("-5"), [sample("-5", [1, 2])]),
    Case("0", ids("0"), [sample("0", [1, 2])]),
    Case("20 digits as text", ids('"98765432109876543210"'), [sample("98765432109876543210", [1, 2])]),
    Case("a date", ids('"2024-01-01"'), [sample("2024-01-01", [1, 2])]),
    Case("a time", ids('"2024-01-01T00:00:00Z"'), [sample("2024-01-01T00:00:00Z", [1, 2])]),
    Case("leading zeros", ids('"007"'), [sample("007", [1, 2])]),
    Case("blanks in an id", ids('" a "'), [sample(" a ", [1, 2])]),
    Case("an id that says true", ids('"true"'), [sample("true", [1, 2])]),
    Case("not NFC", ids('"e\u0301"'), [sample("e\u0301", [1, 2])]),
    Case("null is no id", ids("null"), [t]),
    Case("float", ids("1.5"), [rejected("bad_id")]),
    Case("a whole float", ids("1.0"), [rejected("bad_id")]),
    Case("true", ids("true"), [rejected("bad_id")]),
    Case("empty id", ids('""'), [rejected("bad_id")]),
    Case("an object as id", ids('{"a":1}'), [rejected("bad_id")]),
    Case("another id_key", b'{"id":1,"uuid":"u","input_ids":[1,2]}', [sample("u", [1, 2])], {"id_key": "uuid"}),
    # --- tokens ---
    Case("mask", b'{"input_ids":[1,2,3],"loss_mask":[0,1,0]}', [sample(None, [1, 2, 3], [0, 1, 0])]),
    Case("mask of booleans", b'{"input_ids":[1,2],"loss_mask":[false,true]}', [sample(None, [1, 2], [0, 1])]),
    Case("mask null is no mask", b'{"input_ids":[1,2],"loss_mask":null}', [t]),
    Case("mask too short", ids('"a"', ',"loss_mask":[1]'), [rejected("mask_length", "a")]),
    Case("mask too long", ids('"a"', ',"loss_mask":[1,1,1]'), [rejected("mask_length", "a")]),
    Case("mask empty", ids('"a"', ',"loss_mask":[]'), [rejected("mask_length", "a")]),
    Case("mask of 2", ids('"a"', ',"loss_mask":[1,2]'), [rejected("mask_value", "a")]),
    Case("mask of -1", ids('"a"', ',"loss_mask":[1,-1]'), [rejected("mask_value", "a")]),
    Case("mask of huge", ids('"a"', ',"loss_mask":[1,99999999999999999999]'), [rejected("mask_value", "a")]),
    Case("mask of floats", ids('"a"', ',"loss_mask":[1.0,0.0]'), [rejected("wrong_type", "a")]),
    Case("mask a number", ids('"a"', ',"loss_mask":2'), [rejected("wrong_type", "a")]),
    Case("mask a huge number", ids('"a"', ',"loss_mask":999999999999'), [rejected("wrong_type", "a")]),
    Case("mask text", ids('"a"', ',"loss_mask":"11"'), [rejected("wrong_type", "a")]),
    Case("mask all zero", ids('"a"', ',"loss_mask":[0,0]'), [rejected("empty_mask", "a")]),
    Case(
        "mask all zero, wanted",
        ids('"a"', ',"loss_mask":[0,0]'),
        [sample("a", [1, 2], [0, 0])],
        {"allow_empty_mask": True},
    ),
    Case("no tokens", b'{"id":"a","input_ids":[]}', [rejected("empty", "a")]),
    Case("ids missing", b'{"id":"a"}', [rejected("missing_key", "a")]),
    Case("ids null", b'{"input_ids":null}', [rejected("wrong_type")]),
    Case("ids text", b'{"input_ids":"1 2"}', [rejected("wrong_type")]),
    Case("ids an object", b'{"input_ids":{"1":2}}', [rejected("wrong_type")]),
    Case("ids of texts", b'{"input_ids":["1"]}', [rejected("wrong_type")]),
    Case("ids with a float", b'{"input_ids":[1,2.0]}', [rejected("wrong_type")]),
    Case("ids with null", b'{"input_ids":[1,null]}', [rejected("wrong_type")]),
    Case("ids with true", b'{"input_ids":[1,true]}', [rejected("wrong_type")]),
    Case("ids in an array of arrays", b'{"input_ids":[[1,2]]}', [rejected("wrong_type")]),
    Case("the last id of the vocabulary", b'{"input_ids":[0,99]}', [sample(None, [0, 99])]),
    Case("one past it", b'{"id":7,"input_ids":[0,100]}', [rejected("token_out_of_range", "7")]),
    Case("negative token", b'{"id":7,"input_ids":[-1,5]}', [rejected("token_out_of_range", "7")]),
    Case("token of 2**31", b'{"input_ids":[2147483648]}', [rejected("token_out_of_range")]),
    Case("token of 2**32 + 1", b'{"input_ids":[4294967297]}', [rejected("token_out_of_range")]),
    Case("token of 20 digits", b'{"input_ids":[98765432109876543210]}', [rejected("token_out_of_range")]),
    # --- length ---
    Case("as long as allowed", b'{"input_ids":[1,2,3,4,5,6]}', [sample(None, [1, 2, 3, 4, 5, 6])]),
    Case("cut", b'{"input_ids":[1,2,3,4,5,6,7,8]}', [sample(None, [1, 2, 3, 4, 5, 6], cut=True)]),
    Case(
        "the mask is cut with the ids",
        b'{"input_ids":[1,2,3,4,5,6,7,8],"loss_mask":[0,1,0,0,0,1,1,0]}',
        [sample(None, [1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 0, 1], cut=True)],
    ),
    Case(
        "all that was learned is cut off",
        b'{"id":"a","input_ids":[1,2,3,4,5,6,7],"loss_mask":[0,0,0,0,0,0,1]}',
        [rejected("empty_mask", "a")],
    ),
    Case("too long", b'{"id":"a","input_ids":[1,2,3,4,5,6,7]}', [rejected("too_long", "a")], {"truncate": False}),
    # --- limit, auto ---
    Case("limit counts lines", T + b"\n\n" + T + b"\n" + T, [t, blank], {"limit": 2}),
    Case("auto finds tokens after rubbish", b"rubbish\n\n" + T, [rejected("malformed_json"), blank, t], format="auto"),
    Case(
        "auto finds nothing", b'{"a":1}\n[]\n', [rejected("unknown_format"), rejected("not_an_object")], format="auto"
    ),
    Case("auto, another format on a later line", T + b'\n{"text":"a"}', [t, rejected("missing_key")], format="auto"),
]


def outcomes(table: pa.Table) -> list[Any]:
    rows = []
    for row in table.to_pylist():
        if row["kind"] == SAMPLE:
            rows.append((row["sample_id"], row["input_ids"], row["loss_mask"], row["truncated"]))
        elif row["kind"] == REJECT:
            assert row["message"] and row["code"] in REJECT_CODES
            rows.append((row["code"], row["sample_id"]))
        else:
            assert row["kind"] == BLANK
            rows.append(blank)
    return rows


def write(folder: Path, data: bytes, name: str = "a.jsonl") -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def read(
    path: str, settings: TokenizeSettings = SETTINGS, format: str = "tokens", chunk_bytes: int = 2**25
) -> list[Any]:
    sources = list_sources(InputConfig(path=path, format=InputFormat[format]))
    return [row for chunk in split_sources(sources, chunk_bytes) for row in outcomes(read_chunk(chunk, settings))]


def settings_of(case: Case) -> TokenizeSettings:
    return TokenizeSettings(**{"vocab_size": 100, "max_seq_len": 6} | case.settings)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 80 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lines(case: Case, tmp_path: Path) -> None:
    assert read(write(tmp_path, case.data), settings_of(case), case.format) == case.want


@pytest.mark.parametrize(
    "case", [c for c in CASES if "limit" not in c.settings and len(c.data) < 2000], ids=lambda c: c.name
)
def test_chunks_and_compression_change_nothing(case: Case, tmp_path: Path) -> None:
    path = write(tmp_path, case.data)
    for chunk_bytes in (1, 7, 64):
        assert read(path, settings_of(case), case.format, chunk_bytes) == case.want
    assert read(write(tmp_path, gzip.compress(case.data), "a.jsonl.gz"), settings_of(case), case.format) == case.want
    zst = zstandard.ZstdCompressor().compress(case.data)
    assert read(write(tmp_path, zst, "a.jsonl.zst"), settings_of(case), case.format) == case.want


def test_a_compressed_file_comes_in_tables_of_bounded_size(tmp_path: Path) -> None:
    """Concatenated gzip members, as pigz and `cat` make them, are one file."""
    data = gzip.compress((T + b"\n") * 500) + gzip.compress((T + b"\n") * 500)
    [chunk] = split_sources(list_sources(InputConfig(path=write(tmp_path, data, "a.jsonl.gz"))))
    tables = list(iter_chunk(chunk, SETTINGS, table_bytes=1000))
    assert len(tables) > 10 and sum(map(len, tables)) == 1000
    assert pa.concat_tables(tables).equals(read_chunk(chunk, SETTINGS))


def test_a_line_over_the_limit_is_rejected_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sources", "read"):
        monkeypatch.setattr(f"hs_ray.inputs.{module}.MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("hs_ray.inputs.sources.READ_BYTES", 100)
    data = T + b"\n" + ids('"' + "x" * 5000 + '"') + b"\n" + T
    for chunk_bytes in (50, 2**20):
        assert read(write(tmp_path, data), chunk_bytes=chunk_bytes) == [t, rejected("line_too_long"), t]


def test_the_fast_path_and_the_strict_one_agree(tmp_path: Path) -> None:
    """A spare key that is `true` sends the same record down the strict path."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(0, 9))
        record: dict[str, Any] = {"id": f"s{size}", "input_ids": rng.integers(-2, 103, size).tolist()}
        if rng.random() < 0.7:
            record["loss_mask"] = rng.integers(
                0, 2 + int(rng.random() < 0.1), int(rng.integers(max(size - 1, 0), size + 1))
            ).tolist()
        fast = read(write(tmp_path, json.dumps(record).encode()))
        assert read(write(tmp_path, json.dumps(record | {"x": True}).encode())) == fast
