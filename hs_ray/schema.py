"""Columns, layer ids, records and file names: the contract that every other module shares.

Imports neither torch nor ray nor sglang, so a reader or a test can use it anywhere.

Shape legend, used all over the project:
    S  tokens of a sample (or of a piece of a long one)     H  hidden_size
    L  captured layers                                      N  num_hidden_layers (decoder layers)
    T  rows (tokens) of one engine batch                    C  state columns: L, plus one or two for `final`

Layer id `i` is the residual stream entering decoder layer `i`, residual added, no norm: `i` layers have
run. 0 is the embeddings, N is after the last layer and before the final norm. It is `hidden_states[i]` of
transformers for i < N, the id of vLLM and speculators, and SGLang's `layers_to_capture`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar, get_origin

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hs_ray.errors import ConfigError

FORMAT_VERSION = 1
METADATA_KEY = b"hs_ray"  # key of the JSON in a shard's schema metadata
STATE_DTYPE = "bfloat16"
STATE_BYTES = 2
MAX_CELL_BYTES = 256 * 2**20  # a state column over this is split by tokens into consecutive rows

FINAL_CHOICES = ("pre_norm", "post_norm", "both", "none")
FINAL_COLUMNS = {
    "none": (),
    "pre_norm": ("final_pre_norm",),
    "post_norm": ("final_post_norm",),
    "both": ("final_pre_norm", "final_post_norm"),
}

# Paths inside an output, relative to its root.
SHARDS = "shards"
RUN_JSON = "_run/run.json"
SAMPLES = "_run/samples"
REJECTED = "_run/rejected.parquet"  # lines of the input that never became samples
FINAL_NORM = "_run/final_norm.safetensors"
DONE = "_run/done"
ATTEMPTS = "_run/attempts"
TMP = "_run/tmp"
LEASES = "_run/leases"
PROGRESS = "_run/progress"  # how fast it went, for the report
REJECTS = "_rejects"
MANIFEST = "manifest.json"


def unit_name(unit: int) -> str:
    """`unit-000042`: the stem of everything that belongs to one unit."""
    return f"unit-{unit:06d}"


def marker_path(unit: int) -> str:
    return f"{DONE}/{unit_name(unit)}.json"


def shard_path(unit: int, attempt: str) -> str:
    return f"{SHARDS}/{unit_name(unit)}-{attempt}.parquet"


def resolve_layers(value: Any, num_hidden_layers: int) -> tuple[int, ...]:
    """`eagle3`, `all` or a list of ids -> ids in ascending order.

    `eagle3` is what SpecForge, Model-Optimizer and speculators train on by default: [2, N//2, N-3].
    Raises ConfigError for an empty list, a repeated id, or one outside 0..N.
    """
    n = num_hidden_layers
    if value == "eagle3":
        if n < 7:  # of 6 layers, N//2 and N-3 are one and the same
            raise ConfigError(
                f"layers = eagle3: needs a model of at least 7 decoder layers, this one has {n}; "
                f"list the ids, for example layers=[1,{n}]"
            )
        return (2, n // 2, n - 3)
    if value == "all":
        return tuple(range(n + 1))
    allowed = f"ids from 0 (embeddings) to {n} (after the last layer), each once; or eagle3, or all"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"layers = {value!r}: {allowed}; for example layers=[2,{n // 2},{max(n - 3, 1)}]")
    problems = []
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            problems.append(f"layers = {list(value)}: {item!r} is not a whole number; {allowed}")
        elif not 0 <= item <= n:
            problems.append(f"layers = {list(value)}: {item} is out of range for {n} decoder layers; {allowed}")
    if not problems and len(set(value)) != len(value):
        repeated = sorted({i for i in value if list(value).count(i) > 1})
        problems.append(f"layers = {list(value)}: {repeated} given more than once; {allowed}")
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(value))


def layer_spellings(layers: Sequence[int]) -> list[dict[str, Any]]:
    """Both spellings of each id: ours, and the 0-based decoder layer whose output it is (None: embeddings)."""
    return [{"id": i, "output_of_layer": i - 1 if i else None, "column": f"hidden_{i}"} for i in layers]


@dataclass(frozen=True)
class CaptureSpec:
    """What is captured, for one model. Everything that a state's place and size depend on."""

    layers: tuple[int, ...]  # ascending ids
    final: str  # one of FINAL_CHOICES
    num_hidden_layers: int  # N
    hidden_size: int  # H

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the C state columns, in the order of every array, extent and shard."""
        return tuple(f"hidden_{i}" for i in self.layers) + FINAL_COLUMNS[self.final]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one column."""
        return self.hidden_size * STATE_BYTES

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all columns."""
        return self.row_bytes * len(self.columns)

    def pieces(self, num_tokens: int) -> list[tuple[int, int]]:
        """(token_start, num_tokens) of the rows that a sample becomes: one, unless a column passes 256 MiB."""
        step = max(1, MAX_CELL_BYTES // self.row_bytes)
        return [(start, min(step, num_tokens - start)) for start in range(0, num_tokens, step)]


@dataclass
class Sample:
    """One line of the input that became token ids; what an actor sends to its engine.

    input_ids: int32 [S]; loss_mask: uint8 [S], 1 where the trainer learns, not shifted (numpy arrays).
    """

    sample_id: str
    source: str
    line: int
    input_ids: Any
    loss_mask: Any

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class ColumnStats:
    """Of one state column over some rows. `rms` and `absmax` are over finite rows."""

    rows: int = 0
    sum_squares: float = 0.0
    absmax: float = 0.0
    nonfinite_rows: int = 0  # rows that hold a NaN or an infinity
    zero_rows: int = 0  # rows that are all zero
    checksum: int = 0  # of the bits, see `state_checksum`; taken on the device, before the first copy

    def __add__(self, other: "ColumnStats") -> "ColumnStats":
        return ColumnStats(
            self.rows + other.rows,
            self.sum_squares + other.sum_squares,
            max(self.absmax, other.absmax),
            self.nonfinite_rows + other.nonfinite_rows,
            self.zero_rows + other.zero_rows,
            (self.checksum + other.checksum) % 2**64,
        )

    def rms(self, hidden_size: int) -> float:
        values = (self.rows - self.nonfinite_rows) * hidden_size
        return (self.sum_squares / values) ** 0.5 if values else 0.0


def state_checksum(bits: npt.NDArray[np.uint16], token_start: int = 0) -> int:
    """Checksum of a state: the sum over tokens t (from 1) of t times the sum of row t's bits, as int16, modulo 2^64.

    bits: uint16 [S, H], bf16 bits; token_start: of its first row within the sample. Additive over pieces. It is
    made of sums alone, so that a GPU takes it in passing. Any one changed bit changes it, and so do exchanged tokens
    whose rows' sums differ; the order of the channels within a row does not: a sum has none.
    """
    rows = bits.view(np.int16).sum(axis=1, dtype=np.int64)
    return weighted_checksum(rows, token_start)


def weighted_checksum(row_sums: npt.NDArray[np.int64], token_start: int) -> int:
    """`state_checksum` from the sums of the rows: int64 [S]."""
    weights = np.arange(token_start + 1, token_start + len(row_sums) + 1, dtype=np.int64)
    return int((weights * row_sums).sum(dtype=np.int64)) % 2**64


@dataclass(frozen=True)
class Reject:
    """A line of the input, or a sample, that has no states. `sample_id` is None when the line gave none."""

    sample_id: str | None
    source: str
    line: int
    code: str
    message: str


JsonText = str | bytes  # `Marker` has a field named bytes


@dataclass(frozen=True)
class Marker:
    """The content of `_run/done/unit-000000.json`: its existence says that the shard is committed.

    `shard` is None, `bytes` 0 and `sha256` empty for a unit all of whose samples failed.
    """

    unit: int
    attempt: str
    epoch: int
    fingerprint: str
    shard: str | None
    bytes: int
    sha256: str
    samples: int  # committed samples, each counted once however many rows it became
    rows: int
    tokens: int
    columns: dict[str, ColumnStats] = field(default_factory=dict)
    checksums: dict[str, list[int]] = field(default_factory=dict)  # sample_id -> `state_checksum` of every column
    failed: list[Reject] = field(default_factory=list)
    engine: str = ""
    seconds: float = 0.0
    node: str = ""  # whose own disk the shard is on (`output.node_path`); empty where all nodes see it

    def to_json(self) -> str:
        fields = asdict(self)
        if not self.node:
            del fields["node"]
        return json.dumps(fields, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: JsonText) -> "Marker":
        """Raises ValueError for anything else than a marker, a field of another type among it."""
        try:
            data = json.loads(text)
            data["columns"] = {name: _typed(ColumnStats(**stats)) for name, stats in data["columns"].items()}
            data["failed"] = [_typed(Reject(**reject)) for reject in data["failed"]]
            marker = _typed(cls(**data))
            if not all(type(found) is int for sums in marker.checksums.values() for found in sums):
                raise TypeError("checksums are not whole numbers")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a marker of this format: {error!r}") from None
        return marker


Record = TypeVar("Record", ColumnStats, Reject, Marker)


def _typed(record: Record) -> Record:
    """The record. Raises TypeError where a field is not of its type: JSON has whatever was written into it."""
    for entry in fields(record):
        kind: Any = get_origin(entry.type) if get_origin(entry.type) in (dict, list) else entry.type
        value = getattr(record, entry.name)
        if isinstance(value, bool) or not isinstance(value, (float, int) if kind is float else kind):
            raise TypeError(f"{entry.name} is {value!r:.80}")
    return record


def shard_schema(columns: Sequence[str], compression: str, metadata: dict[str, Any] | None = None) -> pa.Schema:
    """The Arrow schema of a shard (design: one row a sample or a piece of one).

    With `split_zstd` each state column is two: `<name>_hi` (sign and exponent bytes) and `<name>_lo`.
    """
    fields = [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("sample_tokens", pa.int32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("token_start", pa.int32(), nullable=False),
    ]
    fields += [pa.field(name, pa.large_binary(), nullable=False) for name in stored_columns(columns, compression)]
    encoded = {METADATA_KEY: json.dumps(metadata, sort_keys=True).encode()} if metadata is not None else None
    return pa.schema(fields, metadata=encoded)


def stored_columns(columns: Sequence[str], compression: str) -> list[str]:
    """Parquet column names that hold the state columns, in order."""
    if compression == "split_zstd":
        return [name + half for name in columns for half in ("_hi", "_lo")]
    return list(columns)


def shard_metadata(
    spec: CaptureSpec,
    *,
    model: str,
    revision: str | None,
    fingerprint: str,
    compression: str,
    versions: dict[str, str],
) -> dict[str, Any]:
    """What the file's schema metadata says, so that a shard read alone explains itself."""
    return {
        "format_version": FORMAT_VERSION,
        "model": model,
        "revision": revision,
        "num_hidden_layers": spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "layers": layer_spellings(spec.layers),
        "final": spec.final,
        "columns": list(spec.columns),
        "dtype": STATE_DTYPE,
        "byte_order": "little",
        "compression": compression,
        "versions": versions,
        "fingerprint": fingerprint,
    }
