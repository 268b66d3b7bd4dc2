"""Checks across samples, without the model: does every sample have its own states?

A sample leaves a probe; the probes of a run are then compared.

- repeated: two samples whose tokens differ and whose state at the last or the middle token is the same.
- columns: two columns of a sample that hold the same states.
- prefix: samples that begin with the same tokens (a system prompt, a template) have the same states there, up to
  the noise of bf16. Found out: states of another layer, another model, or damage in some of the samples.
- token: a state says which token it belongs to. Over many samples, the states of a token resemble its states
  elsewhere; if a sample's do not match its own tokens better than the same tokens in any other order, its states
  are another sample's, or shifted. The test knows its own power and is silent where it has none.

Shapes: S tokens, H hidden_size, K channels of a probe, P positions of a probe, C state columns.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from hs_ray.verify.report import Report
from hs_ray.verify.rows import to_float

DEPTHS = (1, 2, 4, 8, 16, 32)  # prefix lengths that are compared
MAX_PREFIXES = 2000  # remembered
PREFIX_LIMIT = 0.2  # relative difference of two states of one prefix: bf16 noise is 0.02, the next layer 0.35 and more
CHANNELS, POSITIONS, SKIP = 64, 64, 4  # of a probe; the first tokens' states are extreme in many models
MIN_POSITIONS = 8
# SmolLM2, 126 samples, many languages and code: right ones reach 0.45 of what is expected and more, swapped ones 0.2.
EXPECTED_Z, OWN_SHARE = 8.0, 0.25
PROBE_BYTES = 256 * 2**20  # memory for the probes of the token check


@dataclass
class SampleProbe:
    """What is kept of one sample: tokens int32 [P], channels uint16 [P, K] a column, prefixes uint16 [H] a column."""

    sample_id: str
    file: str
    marks: list[tuple[bytes, bytes]] = field(
        default_factory=list
    )  # (digest of the states of a token, digest of the tokens up to it)
    twins: tuple[str, str] | None = None
    prefixes: dict[bytes, dict[str, np.ndarray]] = field(default_factory=dict)
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    channels: dict[str, np.ndarray] = field(default_factory=dict)


def _digest(*arrays: np.ndarray) -> bytes:
    state = hashlib.blake2b(digest_size=12)
    for array in arrays:
        state.update(array.tobytes())
    return state.digest()


def probe_sample(
    sample_id: str, file: str, input_ids: np.ndarray, states: dict[str, np.ndarray], shared: int, last: str
) -> SampleProbe:
    """input_ids int32 [S], states uint16 [S, H] a column -> what the checks across samples need of them.

    shared: tokens at the beginning that other samples have, too: they say nothing about whose states these are.
    last: the column of layer id N, which `final_pre_norm` rightly equals.
    """
    probe, length = SampleProbe(sample_id, file), len(input_ids)
    deep = {name: bits for name, bits in states.items() if name != "hidden_0"}
    for at in {length - 1, length // 2}:
        if (
            deep and (input_ids[: at + 1] != input_ids[0]).any()
        ):  # one token over and over has one state, whatever its number
            probe.marks.append((_digest(*(bits[at] for bits in deep.values())), _digest(input_ids[: at + 1])))
    names = list(deep)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if (
                {a, b} != {last, "final_pre_norm"}
                and np.array_equal(deep[a][-1], deep[b][-1])
                and np.array_equal(deep[a], deep[b])
            ):
                probe.twins = (a, b)
    for depth in DEPTHS:
        if depth <= length:
            probe.prefixes[_digest(input_ids[:depth])] = {name: bits[depth - 1].copy() for name, bits in states.items()}
    start = max(SKIP, shared)
    if length - start >= MIN_POSITIONS:
        chosen = np.unique(np.linspace(start, length - 1, POSITIONS).astype(int))
        probe.tokens = input_ids[chosen].copy()
        for name, bits in states.items():
            width = bits.shape[1]
            picked = np.random.default_rng(0).permutation(width)[: min(CHANNELS, width)]
            probe.channels[name] = bits[np.ix_(chosen, picked)]
    return probe


class ContentChecks:
    """Takes probes one by one, in bounded memory; `finish` makes the check that needs them all."""

    def __init__(self, num_samples: int, num_columns: int):
        each = max(1, num_columns * POSITIONS * CHANNELS * 2)
        self._stride = -(-num_samples * each // PROBE_BYTES) or 1  # every n-th sample is kept for the token check
        self._taken = 0
        self._marks: dict[bytes, tuple[bytes, str]] = {}
        self._prefixes: dict[bytes, tuple[str, dict[str, np.ndarray]]] = {}
        self._kept: list[SampleProbe] = []
        self.report = Report()

    def add(self, probe: SampleProbe) -> None:
        self._repeated(probe)
        self._prefix(probe)
        probe.prefixes = {}
        if len(probe.tokens) and self._taken % self._stride == 0:
            self._kept.append(probe)
        self._taken += 1

    def _repeated(self, probe: SampleProbe) -> None:
        if probe.twins:
            self.report.add(
                "columns",
                probe.file,
                f"sample {probe.sample_id!r}: columns {probe.twins[0]} and {probe.twins[1]} hold the same states",
            )
        for states, tokens in probe.marks:
            known_tokens, known_id = self._marks.setdefault(states, (tokens, probe.sample_id))
            if known_tokens != tokens and known_id != probe.sample_id:
                self.report.add(
                    "repeated",
                    probe.file,
                    f"sample {probe.sample_id!r} has states of {known_id!r}, whose tokens are others",
                )
                return

    def _prefix(self, probe: SampleProbe) -> None:
        differences: dict[str, list[float]] = {}
        other = ""
        for prefix, states in probe.prefixes.items():
            if prefix not in self._prefixes:
                if len(self._prefixes) < MAX_PREFIXES:
                    self._prefixes[prefix] = (probe.sample_id, states)
                continue
            other, known = self._prefixes[prefix]
            self.report.count("shared_prefixes_compared")
            for name, bits in states.items():
                ours, theirs = to_float(bits), to_float(known[name])
                norm = float(np.linalg.norm(theirs))
                differences.setdefault(name, []).append(float(np.linalg.norm(ours - theirs)) / norm if norm else 0.0)
        for name, found in differences.items():
            if not np.median(found) <= PREFIX_LIMIT:
                detail = f"begins with the tokens of {other!r}, its states there differ by {np.median(found):.2f}"
                self.report.add("prefix", probe.file, f"sample {probe.sample_id!r}, column {name}: {detail}")

    def finish(self) -> Report:
        for name in self._kept[0].channels if self._kept else ():
            self._token_check(name)
        return self.report

    def _token_check(self, name: str) -> None:
        owner = np.repeat(np.arange(len(self._kept)), [len(p.tokens) for p in self._kept])
        _, token = np.unique(np.concatenate([p.tokens for p in self._kept]), return_inverse=True)
        values = np.nan_to_num(to_float(np.concatenate([p.channels[name] for p in self._kept])), posinf=0.0, neginf=0.0)
        values -= np.median(values, axis=0)
        values /= np.maximum(1.4826 * np.median(np.abs(values), axis=0), 1e-12)
        np.clip(values, -3.0, 3.0, out=values)  # no channel and no token may decide alone
        z, size = own_token_scores(values, token, owner, len(self._kept))
        judged = size >= MIN_POSITIONS
        if judged.sum() < 3:
            return
        power = float(np.median(z[judged] / np.sqrt(size[judged])))
        expected_z = power * np.sqrt(size)
        strong = judged & (expected_z > EXPECTED_Z)
        self.report.count("token_checks", int(strong.sum()))
        for i in np.flatnonzero(strong & (z < OWN_SHARE * expected_z)):
            probe = self._kept[i]
            detail = f"the states are not those of the tokens (score {z[i]:.1f}, {expected_z[i]:.0f} expected)"
            self.report.add("token", probe.file, f"sample {probe.sample_id!r}, column {name}: {detail}")


def own_token_scores(
    values: np.ndarray, token: np.ndarray, owner: np.ndarray, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """How well each sample's states fit its tokens, against the same tokens in random order.

    values float32 [T, K] standardised states; token [T] and owner [T] indices. A state is scored with the mean of its
    token's states in other samples. Returns z [samples] and the number of states that could be scored [samples].
    z is exact: the mean and variance of sum_p A[p, pi(p)] over all permutations pi, A the scores (Hoeffding 1951).
    """
    kinds = int(token.max()) + 1
    sums = np.zeros((kinds, values.shape[1]), dtype=np.float64)
    np.add.at(sums, token, values)
    counts = np.bincount(token, minlength=kinds)
    z, size = np.zeros(samples), np.zeros(samples, dtype=int)
    bounds = np.searchsorted(owner, np.arange(samples + 1))
    for i in range(samples):
        x, t = values[bounds[i] : bounds[i + 1]], token[bounds[i] : bounds[i + 1]]
        kind, inverse, own_count = np.unique(t, return_inverse=True, return_counts=True)
        own_sum = np.zeros((len(kind), x.shape[1]))
        np.add.at(own_sum, inverse, x)
        others = counts[kind] - own_count
        kept = others[inverse] > 0
        if kept.sum() < MIN_POSITIONS or len(np.unique(t[kept])) < MIN_POSITIONS // 2:
            continue
        means = (sums[kind] - own_sum) / np.maximum(others, 1)[:, None]
        scores = x[kept] @ means[inverse[kept]].T
        n = len(scores)
        centred = scores - scores.mean(0) - scores.mean(1, keepdims=True) + scores.mean()
        deviation = np.sqrt((centred**2).sum() / (n - 1))
        z[i], size[i] = (np.trace(centred) / deviation if deviation else 0.0), n
    return z, size
