"""Checks across samples, without the model: does every sample have its own states?

A sample leaves a probe; the probes of a run are then compared. Unlike the checksums of the markers, which show that
what the device computed arrived, these look for what was taken from the device wrongly.

- repeated: two samples whose tokens differ and whose state at the last or the middle token is the same.
- columns: two columns of a sample that hold the same states.
- prefix: samples that begin with the same tokens (a system prompt, a template) have nearly the same states there.

Shapes: S tokens, H hidden_size.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from hs_ray.verify.report import Report
from hs_ray.verify.rows import to_float

DEPTHS = (1, 2, 4, 8, 16, 32)  # prefix lengths that are compared
MIN_DEPTHS = 3  # the median of fewer is the noise of one token
MAX_PREFIXES = 2000  # remembered
# Relative difference of two states of one prefix. Other tokens' states differ by 1 and more, bf16 noise by 0.02; but a
# router of a mixture of experts that is near a tie flips on that noise, and the token goes through other experts.
PREFIX_LIMIT = 0.5


@dataclass
class SampleProbe:
    """What is kept of one sample."""

    sample_id: str
    file: str
    marks: list[tuple[bytes, bytes]] = field(default_factory=list)  # digests: states of a token, tokens up to it
    twins: tuple[str, str] | None = None
    prefixes: dict[bytes, dict[str, np.ndarray]] = field(default_factory=dict)  # digest of it: uint16 [H] a column


def _digest(*arrays: np.ndarray) -> bytes:
    state = hashlib.blake2b(digest_size=12)
    for array in arrays:
        state.update(array.tobytes())
    return state.digest()


def probe_sample(
    sample_id: str, file: str, input_ids: np.ndarray, states: dict[str, np.ndarray], last: str
) -> SampleProbe:
    """input_ids int32 [S], states uint16 [S, H] a column -> what the checks across samples need of them.

    last: the column of layer id N, which `final_pre_norm` rightly equals.
    """
    probe, length = SampleProbe(sample_id, file), len(input_ids)
    deep = {name: bits for name, bits in states.items() if name != "hidden_0"}
    for at in {length - 1, length // 2}:
        # One token over and over has one state, whatever its number.
        if deep and (input_ids[: at + 1] != input_ids[0]).any():
            probe.marks.append((_digest(*(bits[at] for bits in deep.values())), _digest(input_ids[: at + 1])))
    names = list(deep)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if {a, b} == {last, "final_pre_norm"} or not np.array_equal(deep[a][-1], deep[b][-1]):
                continue
            if np.array_equal(deep[a], deep[b]):
                probe.twins = (a, b)
    for depth in DEPTHS:
        if depth <= length:
            probe.prefixes[_digest(input_ids[:depth])] = {name: bits[depth - 1].copy() for name, bits in states.items()}
    return probe


class ContentChecks:
    """Takes probes one by one. Keeps two digests a sample, and the states of MAX_PREFIXES prefixes."""

    def __init__(self) -> None:
        self._marks: dict[bytes, tuple[bytes, str]] = {}
        self._prefixes: dict[bytes, tuple[str, dict[str, np.ndarray]]] = {}
        self.report = Report()

    def add(self, probe: SampleProbe) -> None:
        if probe.twins:
            detail = f"columns {probe.twins[0]} and {probe.twins[1]} hold the same states"
            self.report.add("columns", probe.file, f"sample {probe.sample_id!r}: {detail}")
        self._repeated(probe)
        self._prefix(probe)

    def _repeated(self, probe: SampleProbe) -> None:
        for states, tokens in probe.marks:
            known_tokens, known_id = self._marks.setdefault(states, (tokens, probe.sample_id))
            if known_tokens != tokens and known_id != probe.sample_id:
                detail = f"sample {probe.sample_id!r} has states of {known_id!r}, whose tokens are others"
                self.report.add("repeated", probe.file, detail)
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
            if len(found) >= MIN_DEPTHS and not np.median(found) <= PREFIX_LIMIT:
                detail = f"begins with the tokens of {other!r}, its states there differ by {np.median(found):.2f}"
                self.report.add("prefix", probe.file, f"sample {probe.sample_id!r}, column {name}: {detail}")
