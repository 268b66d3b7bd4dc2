"""verify.content: what a capture could take from the device wrongly. Checksums, taken there, too, would fit."""

from typing import Any

from damage import found
from make_output import MadeOutput, rewrite

Rows = list[dict[str, Any]]


def test_states_of_another_sample(made: MadeOutput):
    def change(rows: Rows) -> Rows:
        for name in made.spec.columns:
            rows[0][name] = made.states[5][name].copy()  # both have 40 tokens
        return rows

    rewrite(made, 0, change, fit_checksums=True)
    assert "sample 'id-5' has states of 'id-0'" in found(made)["repeated"][0]


def test_states_of_other_tokens_where_samples_begin_alike(made: MadeOutput):
    rewrite(
        made, 1, lambda rows: [row | {"hidden_4": row["hidden_4"][::-1].copy()} for row in rows], fit_checksums=True
    )
    assert all("column hidden_4: begins with the tokens of" in text for text in found(made)["prefix"])


def test_a_routers_flip_is_no_problem(made: MadeOutput):
    """In a mixture of experts noise changes which experts a token goes through: of one shared prefix state or two."""

    def change(rows: Rows) -> Rows:
        for row in rows:
            row["hidden_4"][:2] = row["hidden_4"][:2][::-1].copy()  # 1 and 2 tokens deep, of 1, 2, 4, 8
        return rows

    rewrite(made, 1, change, fit_checksums=True)
    assert found(made) == {}


def test_one_column_in_place_of_another(made: MadeOutput):
    rewrite(made, 1, lambda rows: [row | {"hidden_4": row["hidden_5"]} for row in rows], fit_checksums=True)
    assert "columns hidden_4 and hidden_5 hold the same states" in found(made)["columns"][0]
