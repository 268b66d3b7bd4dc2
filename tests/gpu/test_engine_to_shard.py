"""From the engine to the shard on CUDA: a sample of 128k tokens, and a disk that cannot keep up.

HS_RAY_TEST_DEVICE=cpu runs them without a GPU, at sizes that it has the time for.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from engine_process import options_for
from engine_to_shard import write

from hs_ray.manifest import list_markers
from hs_ray.reader.shard import ShardFile
from hs_ray.schema import MAX_CELL_BYTES, state_checksum
from hs_ray.storage import LocalStorage

DEVICE = os.environ.get("HS_RAY_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG = 131_072 if DEVICE == "cuda" else 4096
WIDTH = 2048 if DEVICE == "cuda" else 128
BF16_SHARE = 1.5


def test_a_sample_of_128k_tokens(make_tiny: Callable[..., Path], tmp_path: Path) -> None:
    """In chunks through the engine, in pieces of 256 MiB a column into the shard, whole again in the reader."""
    from transformers import LlamaConfig

    # As many key heads as query heads: else torch's attention in fp32 is the one that needs all scores at once.
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_key_value_heads": 4}
    folder = make_tiny(LlamaConfig, max_position_embeddings=LONG, **shape)
    prompt = np.random.default_rng(0).integers(0, 1024, LONG, dtype=np.int32)
    sample_bytes = LONG * options_for(folder).spec.bytes_per_token
    options = options_for(
        folder,
        device=DEVICE,
        chunked_prefill_size=LONG // 16,
        max_seq_len=LONG,
        ring_bytes=2 * sample_bytes,
    )
    written = write(options, tmp_path, [[prompt]])
    storage = LocalStorage(str(tmp_path))
    marker = list_markers(storage)[0]
    assert marker is not None
    assert marker.shard is not None
    rows = marker.rows
    assert rows == -(-LONG * WIDTH * 2 // MAX_CELL_BYTES)
    row_bytes = sample_bytes // rows
    # Nothing copies the states: what Parquet keeps for one row is all that may be held beside the ring.
    assert written.grown_bytes < 1.25 * row_bytes + 2**26, f"{written.grown_bytes:,} for rows of {row_bytes:,}"
    shard = ShardFile(storage, marker.shard)
    columns = options.spec.columns
    sample = shard.sample(shard.sample_rows(1)[0], columns)
    shard.close()
    assert sample["input_ids"].tolist() == prompt.tolist()
    ours = {name: sample[name] for name in columns}
    bits = {name: state.contiguous().view(torch.int16).numpy().view(np.uint16) for name, state in ours.items()}
    assert [state_checksum(bits[name]) for name in columns] == marker.checksums["0-0"]
    exact = reference.states(folder, prompt, options.spec, torch.float32, DEVICE)
    rounded = reference.states(folder, prompt, options.spec, torch.bfloat16, DEVICE)
    for name, wide, own in zip(columns, exact, rounded, strict=True):
        found, limit = reference.error(ours[name].float(), wide), reference.error(own, wide)
        assert found <= BF16_SHARE * limit + 1e-3, f"{name}: {found:.4f}, transformers' own bf16 {limit:.4f}"
        worst = float(reference.by_token(ours[name].float(), wide).max())  # one chunk's rows cannot hide in a mean
        assert worst < 0.2, f"{name}: a token is off by {worst:.3f}"


def test_a_disk_at_a_tenth_of_the_rate(tiny_llama: Path, tmp_path: Path) -> None:
    """The run slows down to the disk: the ring fills, submitting waits, memory stays as it is, nothing is lost."""
    rng = np.random.default_rng(1)
    longest, samples, count = (1500, 60, 8) if DEVICE == "cuda" else (600, 30, 2)
    units = [
        [rng.integers(0, 1024, int(n), dtype=np.int32) for n in rng.integers(1, longest, samples)] for _ in range(count)
    ]
    ring = 2**26 if DEVICE == "cuda" else 2**23
    options = options_for(
        tiny_llama,
        device=DEVICE,
        chunked_prefill_size=2048,
        ring_bytes=ring,
    )
    written = write(options, tmp_path, units, slower=10)
    assert written.bytes > 3 * ring
    assert written.waited_s > 0
    assert written.grown_bytes < ring, f"{written.grown_bytes:,} bytes more"
    storage = LocalStorage(str(tmp_path / "slow"))
    embeddings = reference.load(tiny_llama, torch.bfloat16).get_input_embeddings().weight
    markers = list_markers(storage)
    assert sorted(markers) == list(range(len(units)))
    for number, unit in enumerate(units):
        marker = markers[number]
        assert marker is not None
        assert marker.shard is not None
        shard = ShardFile(storage, marker.shard)
        for index, rows in enumerate(shard.sample_rows(len(unit))):
            sample = shard.sample(rows, ["hidden_0"])
            assert sample["input_ids"].tolist() == unit[index].tolist()
            assert torch.equal(sample["hidden_0"].float(), embeddings[unit[index].astype(np.int64)].float())
        shard.close()
