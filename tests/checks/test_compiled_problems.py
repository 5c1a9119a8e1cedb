"""What torch says while it compiles, as problems. No torch is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from opusmon.checks.compiled_problems import of_limits, of_recompiles, times_mixed
from opusmon.checks.compiled_words import Limit, Recompile
from opusmon.checks.where import NOWHERE, Place

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


@pytest.mark.parametrize(
    ("labels", "for_what"),
    [
        (["batch=8"], " for batch=8"),
        (["inputs 2", "inputs 3", "inputs 4", "inputs 1", "inputs 2"], " for 4 inputs, 5 times"),
        (["batch=8", "batch=8"], " for batch=8, 2 times"),
        ([""], ""),
        (["", ""], ", 2 times"),
    ],
)
def test_all_inputs_that_compile_again_are_counted(labels, for_what):
    assert problem(*labels).what == f"forward is compiled again{for_what}"


def test_inputs_given_before_are_said_to_have_been():
    assert problem("inputs 1", "inputs 2", again=True).what == (
        "forward is compiled again for 2 inputs, 2 times, although these inputs had been given before"
    )


@pytest.mark.parametrize(("place", "subject"), [(NOWHERE, "the module"), (PLACE, "inner")])
def test_a_limit_names_a_function_of_the_user_and_none_of_torch(place, subject):
    (found,) = of_limits([Limit("inner", "recompile_limit", 8, place)])
    assert found.what.startswith(f"{subject} was compiled 8 times")


def test_a_function_with_as_many_graphs_as_there_may_be_may_run_in_eager():
    def calls(again, limits=()):
        forward = [Recompile("forward", "n == 3", PLACE)]
        return [
            *(SimpleNamespace(recompiles=forward, limits=[]) for _ in range(again)),
            SimpleNamespace(recompiles=[Recompile("other", "n == 3", PLACE)], limits=list(limits)),
        ]

    reached = "the recompile limit is reached for {}: timed calls may have run in eager"
    assert times_mixed(calls(6), 8, 0) == ""  # 7 graphs of forward, 2 of other
    assert times_mixed(calls(7), 8, 0) == reached.format("forward")
    given_up = Limit("last", "recompile_limit", 8, NOWHERE)
    assert times_mixed(calls(7, [given_up]), 8, 0) == reached.format("forward, last")
    assert times_mixed(calls(0), 8, 1).startswith("1 more graph came about meanwhile")
