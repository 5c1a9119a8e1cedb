"""How results are compared: known values, with the tolerances of torch.testing.assert_close."""

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

    from opusmon.checks.differences import TOLERANCES, Difference, difference


def apart(got, expected, *, by_largest=False):
    return difference([("out", got)], [("out", expected)], by_largest=by_largest)


def test_differences_are_the_largest_and_zero_has_no_ratio():
    found = apart(torch.tensor([1.0, 4.0, 0.5]), torch.tensor([1.0, 2.0, 0.0]))
    assert found == Difference("out", "float32", 2.0, 1.0, same=False)
    assert found.words == "out off by 2"


@pytest.mark.parametrize(
    ("dtype", "off", "same"),
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
        (torch.complex64, 1.1e-5, True),
        (torch.complex64, 1.2e-5j, False),
        (torch.int64, 0, True),
        (torch.int64, 1, False),
    ],
)
def test_each_dtype_has_its_tolerance(dtype, off, same):
    one = torch.full((3,), 1 + 1j if dtype.is_complex else 1, dtype=dtype)
    assert apart(one + off, one).same is same


def test_one_step_of_float8_is_rounding_and_two_are_not():
    steps = torch.tensor([1.0, 1.125, 1.25]).to(torch.float8_e4m3fn)
    assert apart(steps[1:2], steps[:1]).same
    assert not apart(steps[2:], steps[:1]).same


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in TOLERANCES if not str(dtype).startswith("torch.float8")]
)
def test_the_tolerances_are_those_of_torch(dtype):
    relative, absolute = TOLERANCES[dtype]
    one = torch.ones(1, dtype=dtype)
    with pytest.raises(AssertionError, match=f"up to {absolute:g} allowed"):
        torch.testing.assert_close(one + 1, one)
    with pytest.raises(AssertionError, match=f"up to {relative:g} allowed"):
        torch.testing.assert_close(one + 1, one)


@pytest.mark.parametrize(
    ("dtype", "off", "same"),
    [
        # atol + rtol * 2: of the largest value, although the other one is off.
        (torch.float32, 1.2e-5, True),
        (torch.float32, 1.4e-5, False),
        (torch.bfloat16, 2**-6, True),
        (torch.bfloat16, 2**-4, False),
        (torch.float64, 2.9e-7, True),
        (torch.float64, 3.1e-7, False),
        (torch.int64, 1, False),
    ],
)
def test_by_the_largest_each_value_has_the_tolerance_of_the_largest(dtype, off, same):
    expected = torch.tensor([1, 2], dtype=dtype)
    found = apart(expected + torch.tensor([off, 0], dtype=dtype), expected, by_largest=True)
    assert found.same is same
    assert found.max_abs == pytest.approx(off, rel=0.02)
    assert found.max_rel == pytest.approx(off / 2, rel=0.02)


@pytest.mark.parametrize("by_largest", [False, True])
def test_equal_infinities_and_nans_are_equal_and_others_are_not(by_largest):
    odd = torch.tensor([math.inf, math.nan, -math.inf])
    assert apart(odd, odd.clone(), by_largest=by_largest) == Difference("out", "float32")
    for other in (torch.tensor([math.inf, 1.0, -math.inf]), torch.tensor([-math.inf, math.nan, -math.inf])):
        found = apart(odd, other, by_largest=by_largest)
        assert (found.same, found.max_abs) == (False, math.inf)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(3), "shape torch.Size([3]) instead of torch.Size([2])"),
        (torch.ones(2, dtype=torch.float64), "dtype torch.float64 instead of torch.float32"),
    ],
)
def test_what_cannot_be_compared_is_said(other, words):
    found = apart(other, torch.ones(2))
    assert (found.same, found.other, found.words) == (False, words, words)


def test_another_number_of_tensors_or_another_name_cannot_be_compared():
    one = ("out", torch.ones(2))
    assert difference([one] * 2, [one]).other == "2 tensors came out instead of 1"
    assert not difference([], [one]).same
    assert difference([one], [("past", one[1])]).other == "out came out instead of past"
    assert difference([], []) == Difference()


def test_what_is_named_is_the_tensor_that_is_out_and_not_one_that_only_rounds():
    half, one = torch.full((2,), 1000.0, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    found = difference([("a", half + 8), ("b", one + 1e-3)], [("a", half), ("b", one)])
    assert (found.path, found.dtype, found.same) == ("b", "float64", False)
    assert found.max_abs == pytest.approx(1e-3)


def test_sparse_results_are_compared_by_their_values():
    one = torch.eye(3).to_sparse()
    assert apart(one, one).same
    assert apart(one * 1.5, one).max_abs == 0.5
    assert apart(one.to_dense(), one).words == "layout torch.strided instead of torch.sparse_coo"


def test_nested_results_are_compared_row_by_row():
    with warnings.catch_warnings():
        # That nested tensors of this layout may change.
        warnings.filterwarnings("ignore", module=r"torch\.")
        one = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        longer = torch.nested.nested_tensor([torch.ones(2), torch.ones(4)])
    assert apart(one, one).same
    assert apart(one * 2, one).max_abs == 1.0
    assert not apart(longer, one).same
