"""Inputs for repeated calls, what differences from eager mean, and times: known values."""

from __future__ import annotations

import warnings

from needs import needs

needs("torch")

with warnings.catch_warnings():
    # Of torch about itself, while it is imported.
    warnings.filterwarnings("ignore", module=r"torch\.")
    import torch

    from opusmon.checks.compiled import _apart
    from opusmon.checks.compiled_inputs import fresh_values
    from opusmon.checks.compiled_times import against_float64, times
    from opusmon.checks.differences import Difference
    from opusmon.checks.target import Case
    from opusmon.checks.timing import Times


def test_rounding_that_is_no_worse_than_eagers_is_a_note():
    apart = Difference("out", "float32", 1e-3, 1e-3, same=False)
    assert _apart("inputs", apart, (2e-3, 1e-3)).level == "note"
    assert _apart("inputs", apart, (2.1e-3, 1e-3)).level == "problem"
    assert _apart("inputs", apart, None).level == "problem"


def test_errors_against_float64_are_those_of_each_result():
    case = Case("", lambda x: (x.sum(),), (torch.full((4,), 0.25),), {})
    eager, compiled = ((torch.tensor(value),) for value in (1.5, 1.25))
    inputs = (case.args, {})
    assert against_float64(case, (compiled, *inputs), (eager, *inputs)) == (0.25, 0.5)


def test_code_that_only_runs_in_its_own_dtype_has_no_reference():
    case = Case("", lambda x: x @ torch.ones(4, 4), (torch.ones(4, 4),), {})
    assert against_float64(case, None, None) is None


def test_copies_keep_strides_offset_and_shared_memory():
    whole = torch.arange(16.0).reshape(4, 4)
    part, again = fresh_values((whole[1:, ::2], whole))
    assert (part.stride(), part.storage_offset()) == ((4, 2), 4)
    again[1, 2] = 100.0
    assert part[0, 1] == 100.0
    assert whole[1, 2] == 6.0


def test_copies_keep_dynamic_marks_gradients_and_parameters():
    marked = torch.ones(4, 2, requires_grad=True)
    torch._dynamo.mark_dynamic(marked, 0)
    (copy,) = fresh_values([marked])
    assert copy._dynamo_dynamic_indices == {0}
    assert (copy.requires_grad, copy.is_leaf) == (True, True)
    parameter = fresh_values(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert isinstance(parameter, torch.nn.Parameter)
    assert not parameter.requires_grad


def test_times_are_of_calls_after_the_warm_up(monkeypatch):
    clock = iter(range(10_000))
    calls = []

    def advance():
        calls.append(len(calls))
        for _ in range(100 if len(calls) <= 3 else 1):
            next(clock)

    # A clock that a call moves on by 1 s, and by 100 s while it warms up.
    monkeypatch.setattr("opusmon.checks.timing.time.perf_counter", lambda: next(clock) * 1.0)
    found = times(Case("", advance, (), {}), advance, gpu=False)
    # Reading the clock takes 1 s of its own here.
    assert found == Times(2000.0, 2000.0, 2000.0, 5)
    assert len(calls) == 3 + 5
