"""SmolLM2's own tokenizer and template, from the model's folder, as a task does it. Ids written by hand."""

import json
from pathlib import Path

from hs_ray.config import InputConfig, ModelConfig
from hs_ray.inputs import TokenizeSettings, list_sources, read_chunk, split_sources

# <|im_start|> 1, <|im_end|> 2, "system" 9690, "user" 4093, "assistant" 520 + 9531, newline 198, "Bye" 3087 + 85
SYSTEM = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
    198,
]
LINES = [
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
        ]
    },
    {"messages": [{"role": "system", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    {
        "messages": [
            {"role": "system", "content": "Hi"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
        ]
    },
]
WANT = [
    (
        [*SYSTEM, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198, 19556, 2, 198, 1, 4093, 198, 3087, 85, 2, 198],
        [0] * len(SYSTEM) + [0] * 6 + [0, 0, 0, 0, 1, 1, 0] + [0] * 7,
    ),
    ([1, 9690, 198, 26843, 2, 198, 1, 520, 9531, 198, 19556, 2, 198], [0] * 6 + [0, 0, 0, 0, 1, 1, 0]),
    (
        [1, 9690, 198, 26843, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198, 19556, 2, 198],
        [0] * 12 + [0, 0, 0, 0, 1, 1, 0],
    ),
]


def test_chat_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    [chunk] = split_sources(list_sources(InputConfig(path=str(tmp_path))))
    table = read_chunk(chunk, TokenizeSettings(vocab_size=49152, max_seq_len=8192, model=ModelConfig()))
    assert table["code"].to_pylist() == [None] * 3
    assert list(zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)) == WANT


def test_the_demo_loses_no_sample_when_cut_short() -> None:
    """Whoever tries max_seq_len=512 on it gets all of it: each chat has something to learn in its first tokens."""
    (chunk,) = split_sources(list_sources(InputConfig()))
    table = read_chunk(chunk, TokenizeSettings(vocab_size=49152, max_seq_len=512, model=ModelConfig()))
    assert table["code"].to_pylist() == [None] * 79
    assert max(len(ids) for ids in table["input_ids"].to_pylist()) == 512
