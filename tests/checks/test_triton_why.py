"""Two specialisations, in the forms in which the versions of Triton keep them, and what changed."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from opusmon.checks.triton_why import Argument, Specialisation, changes, nearest, remedy, specialisation

NAMES = ("source", "target", "n", "stride", "BLOCK")
DIVISIBLE = [["tt.divisibility", 16]]
OPTIONS = {"num_warps": 4, "num_stages": 3, "debug": False, "shared": 0, "hash": "0123"}


def since_3_3(*, n=DIVISIBLE, source=DIVISIBLE, dtype="*fp32", stride=1, block=64, **options):
    """As the listener of Triton 3.6.0 was seen to get it for `kernel(source, target, n, stride, BLOCK: tl.constexpr)`."""
    one = stride == 1
    return specialisation(
        NAMES,
        [4],
        {
            "source": dtype,
            "target": "*fp32",
            "n": "i32",
            "stride": "constexpr" if one else "i32",
            "BLOCK": "constexpr",
        },
        {(4,): block, **({(3,): 1} if one else {})},
        {(0,): source, (1,): DIVISIBLE, (2,): n},
        {**OPTIONS, **options},
    )


def before_3_3(*, n=True, source=True, dtype="*fp32", stride=1, block=64, **options):
    """As `compile` of Triton 3.2.0 was seen to get it: an AttrsDescriptor, constants by name."""
    one = stride == 1
    places = [0] * source + [1] + [2] * n
    attributes = SimpleNamespace(
        arg_properties={"tt.divisibility": places, "tt.equal_to": [3] if one else []}
    )
    return specialisation(
        NAMES,
        [4],
        {"source": dtype, "target": "*fp32", "n": "i32", "stride": "i32"},
        {"BLOCK": block, **({"stride": 1} if one else {})},
        attributes,
        {**OPTIONS, **options},
    )


def said(before, after):
    return [(change.kind, change.argument, change.text) for change in changes(before, after)]


def test_both_forms_are_one():
    assert since_3_3() == before_3_3()
    assert since_3_3(n=[], stride=2, block=128) == before_3_3(n=False, stride=2, block=128)


def test_an_integer_that_is_no_multiple_of_16_any_more():
    text = "n was a multiple of 16 and is not now"
    assert said(since_3_3(), since_3_3(n=[])) == [("alignment", "n", text)]
    assert said(before_3_3(), before_3_3(n=False)) == [("alignment", "n", text)]


def test_an_integer_that_became_a_multiple_of_16():
    assert said(since_3_3(n=[]), since_3_3()) == [("alignment", "n", "n is a multiple of 16 now and was not")]


def test_an_address_that_is_not_aligned():
    text = "the address of source was aligned to 16 bytes and is not now"
    assert said(since_3_3(), since_3_3(source=[])) == [("alignment", "source", text)]
    assert said(before_3_3(), before_3_3(source=False)) == [("alignment", "source", text)]


def test_an_integer_that_was_1():
    text = "stride was 1 and is not now"
    assert said(since_3_3(), since_3_3(stride=2)) == [("equal_to_1", "stride", text)]
    assert said(before_3_3(), before_3_3(stride=2)) == [("equal_to_1", "stride", text)]
    assert said(since_3_3(stride=2), since_3_3()) == [("equal_to_1", "stride", "stride is 1 now")]


def test_a_constexpr():
    assert said(since_3_3(), since_3_3(block=128)) == [
        ("constexpr", "BLOCK", "constexpr BLOCK was 64 and is 128 now")
    ]


def test_a_constexpr_that_is_1_is_still_a_constexpr():
    assert said(since_3_3(block=1), since_3_3(block=2)) == [
        ("constexpr", "BLOCK", "constexpr BLOCK was 1 and is 2 now")
    ]


def test_a_dtype():
    assert said(since_3_3(), since_3_3(dtype="*bf16")) == [
        ("dtype", "source", "source was *fp32 and is *bf16 now")
    ]


def test_none_for_a_pointer_is_a_change_of_dtype():
    with_none = specialisation(("mask",), [], {"mask": "constexpr"}, {(0,): None}, {}, {})
    without = specialisation(("mask",), [], {"mask": "*i1"}, {}, {(0,): DIVISIBLE}, {})
    assert said(with_none, without) == [("dtype", "mask", "mask was None and is *i1 now")]


def test_options_of_the_launch_and_not_what_follows_from_them():
    assert said(since_3_3(), since_3_3(num_warps=8, shared=512, hash="4567")) == [
        ("options", "num_warps", "num_warps was 4 and is 8 now")
    ]


def test_an_option_that_was_not_set():
    assert said(since_3_3(), since_3_3(maxnreg=128)) == [
        ("options", "maxnreg", "maxnreg was unset and is 128 now")
    ]


def test_several_changes_the_most_telling_first():
    kinds = [kind for kind, _, _ in said(since_3_3(), since_3_3(n=[], block=32, dtype="*i8", num_warps=1))]
    assert kinds == ["dtype", "constexpr", "options", "alignment"]


def test_parts_of_a_tuple():
    def of(*aligned):
        return specialisation(
            ("pair",), [], {"pair": ("*fp32", "i32")}, {}, {(0, at): DIVISIBLE for at in aligned}, {}
        )

    assert of(0, 1).arguments["pair"].aligned == "0,1"
    assert [change.kind for change in changes(of(0, 1), of(0))] == ["alignment"]


def test_the_nearest_earlier_one_counts_and_of_equals_the_latest():
    earlier = [since_3_3(dtype="*fp16", block=32), since_3_3(block=64), since_3_3(block=128)]
    found = nearest(earlier, since_3_3(block=256))
    assert [change.text for change in found] == ["constexpr BLOCK was 128 and is 256 now"]


def test_a_long_value_is_cut():
    found = specialisation(("F",), [0], {"F": "constexpr"}, {(0,): "x" * 500}, {}, {})
    assert found.arguments["F"].value == "x" * 57 + "..."


def test_remedies_name_the_argument():
    assert 'do_not_specialize_on_alignment=["n"]' in remedy(changes(since_3_3(), since_3_3(n=[])))
    assert 'do_not_specialize=["stride"]' in remedy(changes(since_3_3(), since_3_3(stride=2)))
    assert "multiple of 16 bytes" in remedy(changes(since_3_3(), since_3_3(source=[])))
    assert remedy([]) == ""


arguments = st.builds(
    Argument,
    dtype=st.sampled_from(["", "*fp32", "*bf16", "i32", "i64", "('*fp32', 'i32')"]),
    value=st.sampled_from([None, "1", "None", "64"]),
    is_constexpr=st.booleans(),
    aligned=st.sampled_from(["", "16", "0,1"]),
)


@given(arguments, arguments)
def test_there_is_a_change_exactly_where_something_differs(old, new):
    found = changes(Specialisation({"x": old}), Specialisation({"x": new}))
    assert bool(found) == (old != new)
    assert all(change.argument == "x" and change.text for change in found)
