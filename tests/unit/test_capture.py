"""The scheduler's side without a scheduler: which rows are whose, and what is refused with its arithmetic."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hs_ray.engine.capture import Capture, CaptureSetup, make_rid, parse_rid
from hs_ray.engine.models import entry_for
from hs_ray.engine.transport import RowRange
from hs_ray.errors import CaptureError
from hs_ray.schema import CaptureSpec

N, H = 6, 8


class Layer(torch.nn.Module):
    def forward(self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return hidden_states


class Inner(torch.nn.Module):
    """Stands for SGLang's inner model: `layers_to_capture` and a final norm that adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(N))
        self.norm = SumNorm()
        self.layers_to_capture: list[int] = []


class SumNorm(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (hidden + residual) * 2, hidden + residual


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.logits_processor = torch.nn.Identity()
        self.capture_aux_hidden_states = False


class Kept:
    def __init__(self) -> None:
        self.sent: list[tuple[list[RowRange], list[torch.Tensor]]] = []

    def send(self, rows: list[RowRange], columns: list[torch.Tensor]) -> None:
        self.sent.append((rows, columns))


def capture(layers: tuple[int, ...] = (1, 3), final: str = "both") -> tuple[Capture, Outer, Kept]:
    spec = CaptureSpec(layers, final, N, H)
    setup = CaptureSetup(spec, "LlamaForCausalLM", "0.5.23", "", 0, "", b"")
    made, model, kept = Capture(setup, SimpleNamespace(), 0), Outer(), Kept()  # type: ignore[arg-type]
    entry = entry_for("LlamaForCausalLM", "0.5.23")
    assert entry is not None
    made._install(model, model.model, entry)
    made.transport = kept  # type: ignore[assignment]
    return made, model, kept


def batch(*parts: tuple[str, int, int], extend: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        reqs=[SimpleNamespace(rid=rid) for rid, _, _ in parts],
        prefix_lens=[start for _, start, _ in parts],
        extend_lens=[count for _, _, count in parts],
    )


def state(rows: int, value: float, width: int = H, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((rows, width), value, dtype=dtype)


def forward(made: Capture, model: Outer, aux: Any, rows: int) -> None:
    made._active and model.model.norm(state(rows, 5), state(rows, 6))
    made.collect(aux, state(rows, 22))


def test_rows_follow_request_id_and_token_range() -> None:
    made, model, kept = capture()
    first, second = make_rid(1, 4096, 10), make_rid(2, 8192, 7)
    made.begin(batch((first, 4, 6), ("HEALTH_CHECK_1", 0, 3), (second, 0, 5)))
    forward(made, model, [state(14, 1), state(14, 3)], 14)
    made.finish()
    ((rows, columns),) = kept.sent
    assert rows == [RowRange(first, 4096, 10, 4, 6, 0), RowRange(second, 8192, 7, 0, 5, 9)]
    assert [float(column[0, 0]) for column in columns] == [1, 3, 11, 22]  # hidden_1, hidden_3, pre_norm, post_norm


def test_layers_are_set_and_named_by_id() -> None:
    _, model, _ = capture((0, 2, N), "none")
    assert model.model.layers_to_capture == [0, 2]  # N is the final norm's input
    assert model.capture_aux_hidden_states


def test_packed_states_are_taken_apart() -> None:
    made, model, kept = capture()
    made.begin(batch((make_rid(1, 0, 3), 0, 3)))
    forward(made, model, torch.cat([state(3, 1), state(3, 3)], dim=-1), 3)
    made.finish()
    assert [float(column[2, 7]) for column in kept.sent[0][1]] == [1, 3, 11, 22]


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        ([state(3, 1)], r"asked for layers \[1, 3\]: 2 states, got 1"),
        ([state(2, 1), state(3, 1)], r"hidden_1: expected 3 tokens x 8 bfloat16, got \(2, 8\)"),
        ([state(3, 1), state(3, 1, width=7)], r"hidden_3: expected 3 tokens x 8 bfloat16, got \(3, 7\)"),
        ([state(3, 1, dtype=torch.float16), state(3, 1)], r"hidden_1: .* got \(3, 8\) torch.float16"),
    ],
)
def test_wrong_states_are_refused_with_the_arithmetic(aux: list[torch.Tensor], message: str) -> None:
    made, model, kept = capture()
    made.begin(batch((make_rid(1, 0, 3), 0, 3)))
    forward(made, model, aux, 3)
    with pytest.raises(CaptureError, match=message):
        made.finish()
    assert kept.sent == []


def test_a_forward_pass_that_never_reached_the_logits_processor_is_refused() -> None:
    made, _, _ = capture()
    made.begin(batch((make_rid(1, 0, 3), 0, 3)))
    with pytest.raises(CaptureError, match="ran 0 times"):
        made.finish()


def test_more_tokens_than_were_reserved_are_refused() -> None:
    made, _, _ = capture()
    with pytest.raises(CaptureError, match=r"tokens 2\+3 > 4 reserved"):
        made.begin(batch((make_rid(1, 0, 4), 2, 3)))


def test_decode_steps_and_foreign_requests_are_let_alone() -> None:
    made, model, kept = capture()
    for parts, extend in (((make_rid(1, 0, 3), 3, 1),), False), ((("warmup", 0, 5),), True):
        made.begin(batch(*parts, extend=extend))
        forward(made, model, None, 5)
        made.finish()
    assert kept.sent == []


def test_request_ids_carry_their_extent_and_have_one_length() -> None:
    assert parse_rid(make_rid(7, 123456789, 4096)) == (123456789, 4096)
    assert parse_rid("HEALTH_CHECK-1") is None
    assert len(make_rid(0, 0, 1)) == len(make_rid(10**9, 10**13, 10**6))
