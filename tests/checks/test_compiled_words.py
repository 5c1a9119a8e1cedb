"""What torch says while it compiles, as data. The messages are those of torch 2.6 and 2.13."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.checks.compiled_words import (
    cudagraph_skips,
    graph_breaks,
    limits,
    recompiles,
    torch_says,
    without_texts,
)

HERE = str(Path(__file__).resolve())


def break_26(reason: str) -> str:
    return (
        f"Graph break in user code at {HERE}:7\nReason: {reason}\nUser code traceback:\n"
        f'  File "{HERE}", line 7, in fn\n    n = y.item()\n'
    )


def break_213(reason: str) -> str:
    return (
        f"Graph break in user code at {HERE}:7\nGraph Break Reason: {reason}\n\n"
        f'User code traceback:\n  File "{HERE}", line 3, in outer\n    fn()\n  File "{HERE}", line 7, in fn\n'
    )


def test_the_words_of_torch_26_are_known():
    (found,) = graph_breaks([break_26("Unsupported: Tensor.item")])
    assert found.said == "Unsupported: Tensor.item"
    assert found.place.where.endswith("test_compiled_words.py:7")


def test_a_break_has_its_innermost_line_explanation_and_hints():
    reason = (
        "Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):\n\n"
        "Some operator\n  Explanation: It depends on data.\n  Hint: Do this.\n  Hint: Or that.\n\n"
        "  Developer debug context: secret"
    )
    (found,) = graph_breaks([break_213(reason)])
    assert found.said == "Some operator: It depends on data."
    assert found.hints == ("Do this.", "Or that.")
    assert found.place.where.endswith(":7")
    assert not found.skipped
    assert "secret" not in repr(found)


def test_a_function_of_an_extension_module_is_named_and_one_of_python_is_not():
    words = "Skipped\n  Explanation: Dynamo does not know how to trace the builtin `{}.` This function is"
    assert [
        found.native
        for name in ("my_ext.PyCapsule.scale", "time.sleep", "torch._C.foo")
        for found in graph_breaks([break_213(words.format(name))])
    ] == ["my_ext.PyCapsule.scale", "", ""]


def test_a_message_about_something_else_is_no_break():
    assert graph_breaks(["Recompiling function f in a.py:3\n    triggered by"]) == []


GUARD = (
    f"Recompiling function fn in {HERE}:3\n    triggered by the following guard failure(s):\n"
    "    - 0/1: n == 3          # return x * n  # {tail}:9 in fn\n{trace}"
    "    - 0/0: tensor 'x' size mismatch at index 0. expected 8, actual 16"
)


def test_the_newest_graphs_guard_is_given_with_the_line_that_needs_it():
    trace = f'    - User stack trace:\n    -   File "{HERE}", line 8, in fn\n'
    (found,) = recompiles([GUARD.format(tail=HERE[-20:], trace=trace)])
    assert (found.function, found.guard) == ("fn", "n == 3")
    assert found.place.where.endswith(":8")


def test_without_a_stack_the_guards_comment_names_the_line():
    (found,) = recompiles([GUARD.format(tail=HERE[-20:], trace="")])
    assert found.place.where.endswith(":9")


def test_a_comment_about_another_file_is_not_taken():
    (found,) = recompiles([GUARD.format(tail="elsewhere.py", trace="")])
    assert found.place.where.endswith(":3")


@pytest.mark.parametrize("limit", ["recompile_limit", "cache_size_limit"])
def test_the_limit_has_its_name_and_value(limit):
    said = f"torch._dynamo hit config.{limit} (8)\n   function: 'fn' ({HERE}:3)\n   last reason: 0/7: n == 3"
    (found,) = limits([said])
    assert (found.function, found.name, found.value) == ("fn", limit, 8)


def test_a_skipped_cuda_graph_has_its_reason_and_line():
    said = f'skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   File "{HERE}", line 9, in fn\n'
    (found,) = cudagraph_skips([said, said])
    assert (found.reason, found.part) == ("mutated inputs (1 instances)", False)
    assert found.place.where.endswith(":9")


def test_work_between_pieces_of_a_cuda_graph_is_known_in_both_forms():
    old = f'cudagraph partition due to cpu ops. Found from : \n   File "{HERE}", line 9, in fn'
    new = [
        "    buf0: reason=cpu ops, ir=ComputedBuffer, fx=aten.mul(a, b)",
        f'         File "{HERE}", line 9, in fn',
    ]
    assert cudagraph_skips([old]) == cudagraph_skips(new)
    assert cudagraph_skips(new)[0].part


def test_compared_texts_are_left_out():
    assert (
        without_texts("L['prompt'] == 'who are you' and n == 3") == "L['prompt'] == <text of 11> and n == 3"
    )
    assert without_texts('x is "abc"') == "x is <text of 3>"


@given(st.text())
def test_no_message_is_too_odd(text):
    torch_says(text)
    for prefix in ("", break_26(""), GUARD, "torch._dynamo hit config.", "skipping cudagraphs due to "):
        graph_breaks([prefix + text])
        recompiles([prefix + text])
        limits([prefix + text])
        cudagraph_skips([prefix + text])
