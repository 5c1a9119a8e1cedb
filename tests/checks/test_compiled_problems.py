"""What torch says while it compiles, as problems. No torch is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from opusmon.checks.compiled_problems import of_recompiles
from opusmon.checks.compiled_words import Recompile
from opusmon.checks.where import Place

PLACE = Place("model.py:3", "def forward(self, x):")


def problem(*labels: str, guard: str = "n == 3", again: bool = False):
    """The one of calls with these labels that each compile `forward` again for the same guard."""
    calls = [
        SimpleNamespace(
            label=label, again=again, seconds=1.0, recompiles=[Recompile("forward", guard, PLACE)]
        )
        for label in labels
    ]
    (found,) = of_recompiles([SimpleNamespace(calls=calls)])
    return found


def sizes(expected: int, actual: int) -> str:
    return f"tensor 'x' size mismatch at index 0. expected {expected}, actual {actual}"


@pytest.mark.parametrize(
    ("guard", "special"),
    [
        (sizes(1, 8), "size 1 keeps"),
        (sizes(8, 1), "size 1 keeps"),
        (sizes(0, 8), "size 0 keeps"),
        (sizes(1, 0), "sizes 0 and 1 each keep"),
    ],
)
def test_a_size_that_torch_makes_no_symbol_of_keeps_a_graph_beside_the_one_for_all_others(guard, special):
    change = problem("batch=8", guard=guard).change
    assert change == (
        f"{special} a graph of its own, marked or not: warm up with it too, or pad to 2; "
        "one for the others: torch._dynamo.mark_dynamic(tensor, 0)"
    )


@pytest.mark.parametrize("guard", [sizes(2, 8), sizes(10, 11)])
def test_other_sizes_need_one_graph(guard):
    assert (
        problem("batch=8", guard=guard).change
        == "one graph for all sizes: torch._dynamo.mark_dynamic(tensor, 0)"
    )


def test_a_marked_size_that_becomes_one_has_its_advice():
    assert "pad to 2" in problem("batch=1", guard="2 <= args[0].size()[0]").change
