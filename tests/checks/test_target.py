"""TARGET: how it is written, loaded and called."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.checks.target import TargetError, cases, load, parse_buckets

PLAIN = Path(__file__).parent / "targets" / "plain.py"


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """Loading adds to the path and to the modules, as an import does."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "plain", raising=False)


def calls(name, buckets=None):
    return [
        (case.label, case.args, dict(case.kwargs), case.call())
        for case in cases(load(f"{PLAIN}:{name}"), buckets or {})
    ]


def test_inputs_are_a_tuple_a_dict_or_the_single_argument():
    assert calls("pair") == [("", (2, 1), {}, 3)]
    assert calls("named") == [("", (), {"a": 1, "b": 2}, 3)]
    assert calls("single") == [("", (5,), {}, 6)]


def test_a_list_is_one_bucket_each():
    assert calls("several") == [
        ("inputs 1", (1, 2), {}, 3),
        ("inputs 2", (), {"a": 3}, 4),
        ("inputs 3", (4,), {}, 5),
    ]


def test_values_of_the_command_line_call_the_target_once_for_each_combination():
    assert [(label, args) for label, args, _, _ in calls("pair", {"size": [3, 8]})] == [
        ("size=3", (3, 1)),
        ("size=8", (8, 1)),
    ]


def test_a_target_inside_a_class_and_one_in_a_module(monkeypatch):
    assert [case.call() for case in cases(load(f"{PLAIN}:Holder.make"), {})] == [3]
    monkeypatch.syspath_prepend(str(PLAIN.parent))
    assert [case.call() for case in cases(load("plain:pair"), {})] == [3]


def test_a_file_named_like_a_module_of_python_does_not_replace_it(tmp_path):
    import profile

    (tmp_path / "profile.py").write_text("def make(): return abs, -3\n")
    assert [case.call() for case in cases(load(f"{tmp_path}/profile.py:make"), {})] == [3]
    assert sys.modules["profile"] is profile


def test_a_file_of_a_package_may_import_from_it(tmp_path, monkeypatch):
    inner = tmp_path / "serving_here" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "sizes.py").write_text("SIZE = 7\n")
    (inner / "step.py").write_text("from ..sizes import SIZE\ndef make(): return abs, -SIZE\n")
    assert [case.call() for case in cases(load(f"{inner}/step.py:make"), {})] == [7]
    monkeypatch.chdir(inner)
    assert [case.call() for case in cases(load("step.py:make"), {})] == [7]
    for name in [name for name in sys.modules if name.partition(".")[0] == "serving_here"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("make", "buckets", "words"),
    [
        (
            "add",
            {},
            "called without arguments: missing a required argument: 'a' (--bucket NAME=V,V gives some)",
        ),
        ("pair", {"batch": [1]}, "called with those of --bucket: got an unexpected keyword argument 'batch'"),
        ("no_pair", {}, "must return (fn, inputs) or (module, inputs), not function"),
        ("single_in_three", {}, "not (builtin_function_or_method, int, int)"),
    ],
)
def test_a_target_that_is_not_as_it_should_be_is_told_what_it_is(make, buckets, words):
    with pytest.raises(TargetError) as caught:
        cases(load(f"{PLAIN}:{make}"), buckets)
    assert words in str(caught.value)
    assert ("gives some" in str(caught.value)) == (make == "add")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("pair", "is no target: write module:callable or file.py:callable"),
        (":pair", "is no target"),
        (f"{PLAIN}:", "is no target"),
        ("/nowhere/model.py:make", "there is no file /nowhere/model.py"),
        ("no_such_module_here:make", "there is no module named no_such_module_here"),
        (f"{PLAIN}:missing", "has no callable named missing"),
        (f"{PLAIN}:VALUE", "has no callable named VALUE"),
        (f"{PLAIN}:Holder.missing", "has no callable named Holder.missing"),
    ],
)
def test_what_is_no_target_is_said_in_one_line(target, words):
    with pytest.raises(TargetError) as caught:
        load(target)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"), [("no_pair", "must return (fn, inputs)"), ("nothing", "empty list")]
)
def test_what_the_target_returns_must_be_a_pair_with_inputs(name, words):
    with pytest.raises(TargetError, match=words.replace("(", r"\(").replace(")", r"\)")):
        cases(load(f"{PLAIN}:{name}"), {})


def test_a_module_that_the_users_module_lacks_is_not_called_a_wrong_target(tmp_path):
    (tmp_path / "lacking.py").write_text("import no_such_dependency\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load(f"{tmp_path / 'lacking.py'}:make")


def test_buckets_are_numbers_where_they_can_be():
    assert parse_buckets(["batch=1,8", "rate=0.5", "kind=bf16,2"]) == {
        "batch": [1, 8],
        "rate": [0.5],
        "kind": ["bf16", 2],
    }


def test_values_of_one_name_add_up():
    assert parse_buckets(["batch=1,8", "size=2", "batch=16"]) == {"batch": [1, 8, 16], "size": [2]}


@pytest.mark.parametrize("text", ["batch", "batch=", "=1", "1x=2", "a b=1"])
def test_a_bucket_that_is_not_written_as_one(text):
    with pytest.raises(TargetError, match="is no bucket: write name=value,value"):
        parse_buckets([text])


@given(st.text())
def test_any_text_is_a_bucket_or_an_error(text):
    try:
        found = parse_buckets([text])
    except TargetError:
        return
    ((name, values),) = found.items()
    assert name.isidentifier()
    assert values
