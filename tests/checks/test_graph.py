"""`check graph` without a GPU: every planted violation by its kind and line, and nothing on clean code."""

import math
from pathlib import Path

import pytest
from needs import needs

needs("torch")

import torch  # noqa: E402

from opusmon.checks import graph_static  # noqa: E402
from opusmon.checks.graph_inputs import changes, difference, key, other_values  # noqa: E402
from opusmon.checks.graph_words import BREAKING, WORDS, code_of, kind_of, said  # noqa: E402
from opusmon.checks.target import Case  # noqa: E402

TARGETS = Path(__file__).parent / "targets" / "graph_plain.py"


def line_of(mark, path=TARGETS):
    lines = path.read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE {mark}")]
    assert len(found) == 1
    return found[0]


def checked(name, **buckets):
    return graph_static.check({"target": f"{TARGETS}:{name}", "buckets": buckets}, lambda stage: None)


def found(result, level="problem"):
    return [(one.kind, int(one.where.rpartition(":")[2])) for one in result.problems if one.level == level]


def fact(result, name):
    return next(one.value for one in result.facts if one.name == name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("item", "item"),
        ("branch", "branch"),
        ("host_copy", "host_copy"),
        ("to_host", "host_copy"),
        ("tolist", "host_copy"),
        ("host_tensor", "host_tensor"),
        ("nonzero", "dynamic_shape"),
        ("mask", "dynamic_shape"),
        ("unique", "dynamic_shape"),
        ("synchronize", "synchronize"),
        ("generator", "generator"),
        ("host_random", "host_random"),
        ("python_state", "python_state"),
    ],
)
def test_a_planted_violation_is_named_with_its_line(name, kind):
    result = checked(name)
    assert found(result) == [(kind, line_of(name))]
    one = result.problems[0]
    assert one.line.endswith(f"# HERE {name}")
    assert one.change
    assert not result.clean
    assert result.basis.startswith("static: one call on the CPU")


@pytest.mark.parametrize("name", ["mlp", "filled"])
def test_clean_code_has_no_problems_and_no_notes(name):
    result = checked(name)
    assert result.problems == []
    assert result.not_measured == []
    assert fact(result, "repeatable") is True
    assert fact(result, "graph_breaks") == 0
    assert fact(result, "exports") is True
