"""Inputs for repeated calls, and how results are compared: known values."""

from __future__ import annotations

import math
import warnings

import pytest
from needs import needs

needs("torch")

with warnings.catch_warnings():
    # Of torch about itself, while it is imported.
    warnings.filterwarnings("ignore", module=r"torch\.")
    import torch

    from opusmon.checks.compiled import _apart
    from opusmon.checks.compiled_inputs import fresh_values
    from opusmon.checks.compiled_times import Difference, Times, against_float64, difference, times
    from opusmon.checks.target import Case


def test_differences_are_the_largest_and_zero_has_no_ratio():
    found = difference([torch.tensor([1.0, 4.0, 0.5])], [torch.tensor([1.0, 2.0, 0.0])])
    assert (found.max_abs, found.max_rel, found.within, found.dtype) == (2.0, 1.0, False, "float32")


@pytest.mark.parametrize(
    ("dtype", "off", "within"),
    [
        # The bound at 1 is the relative and the absolute tolerance together.
        (torch.float32, 1.1e-5, True),
        (torch.float32, 1.2e-5, False),
        (torch.float64, 1.9e-7, True),
        (torch.float64, 2.1e-7, False),
        (torch.bfloat16, 2**-7, True),
        (torch.bfloat16, 2**-5, False),
        (torch.float16, 2**-10, True),
        (torch.float16, 2**-9, False),
        (torch.int64, 0, True),
        (torch.int64, 1, False),
    ],
)
def test_each_dtype_has_its_tolerance(dtype, off, within):
    one = torch.ones(3, dtype=dtype)
    assert difference(one + off, one).within is within


def test_equal_infinities_and_nans_are_equal_and_others_are_not():
    odd = torch.tensor([math.inf, math.nan, -math.inf])
    assert difference(odd, odd.clone()) == Difference(dtype="float32")
    for other in (torch.tensor([math.inf, 1.0, -math.inf]), torch.tensor([-math.inf, math.nan, -math.inf])):
        assert not difference(odd, other).within


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(3), "shape torch.Size([3]) instead of torch.Size([2])"),
        (torch.ones(2, dtype=torch.float64), "dtype torch.float64 instead of torch.float32"),
        ([torch.ones(2)] * 2, "2 tensors came out instead of 1"),
    ],
)
def test_what_cannot_be_compared_is_said(other, words):
    found = difference(other, torch.ones(2))
    assert (found.within, found.other) == (False, words)


def test_the_dtype_named_is_that_of_the_tensor_that_is_out():
    half = torch.ones(2, dtype=torch.bfloat16)
    found = difference([half, torch.ones(2) + 1], [half, torch.ones(2)])
    assert found.dtype == "float32"


def test_rounding_that_is_no_worse_than_eagers_is_a_note():
    apart = Difference(1e-3, 1e-3, within=False, dtype="float32")
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
    monkeypatch.setattr("opusmon.checks.compiled_times.time.perf_counter", lambda: next(clock) * 1.0)
    found = times(Case("", advance, (), {}), advance, gpu=False)
    # Reading the clock takes 1 s of its own here.
    assert found == Times(2000.0, 2000.0, 2000.0, 5)
    assert len(calls) == 3 + 5
