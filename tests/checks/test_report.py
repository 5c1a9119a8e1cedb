"""A result as text."""

from dataclasses import replace

from opusmon.checks.report import as_text, headline, verdict
from opusmon.checks.result import Fact, Missing, Problem, Result, Table

PROBLEM = Problem(
    "item",
    "reads a value back to the host",
    "serve.py:42",
    "total += loss.item()",
    "900 not permitted while a stream is capturing",
    "keep the value on the device",
    facts={"count": 3, "wait_ms": 1.25},
)


def test_all_of_a_result():
    result = Result(
        "graph",
        "serve.py:step",
        "measured on NVIDIA H200",
        [PROBLEM, Problem("lazy_load", "is loaded at first use", level="note")],
        [Fact("replay_ms", 0.31, "replay 0.31 ms")],
        [Table("times", ("bucket", "replay_ms"), (("batch=1", 0.5), ("batch=16", None)))],
        [Missing("bank conflicts", "no counter")],
    )
    assert as_text(result) == (
        "check graph serve.py:step: 1 problem\n"
        "   basis: measured on NVIDIA H200\n"
        "\n"
        "!! serve.py:42  reads a value back to the host  [item]\n"
        "   > total += loss.item()\n"
        "   said: 900 not permitted while a stream is capturing\n"
        "   count 3, wait_ms 1.25\n"
        "   change: keep the value on the device\n"
        "\n"
        "i  is loaded at first use  [lazy_load]\n"
        "\n"
        "   - replay 0.31 ms\n"
        "\n"
        "times\n"
        "   bucket    replay ms\n"
        "   batch=1         0.5\n"
        "   batch=16         --\n"
        "\n"
        "   not measured: bank conflicts: no counter\n"
    )


def test_the_verdict():
    assert verdict(Result("graph")) == "clean"
    assert verdict(Result("graph", problems=[PROBLEM, PROBLEM])) == "2 problems"
    assert verdict(Result("graph", problems=[PROBLEM], error="no torch")) == "could not run: no torch"


def test_what_is_clean_without_a_measurement_says_so():
    assert verdict(Result("graph", basis="static: one call on the CPU")) == "clean (static)"
    assert verdict(Result("graph", basis="measured on NVIDIA H200")) == "clean"


def test_problems_come_before_notes():
    note = Problem("slow", "a note", level="note")
    lines = as_text(Result("graph", problems=[note, PROBLEM])).splitlines()
    assert [line[:2] for line in lines if line[:2] in ("!!", "i ")] == ["!!", "i "]


def test_a_table_wider_than_the_terminal_is_a_paragraph_a_row():
    table = Table("calls", ("bucket", "words", "ms"), (("a", "x" * 30, 1.5), ("b", "y " * 30, None)))
    result = Result("graph", tables=[table])
    assert all(len(line) <= 40 for line in as_text(result, 40).splitlines())
    assert "   * bucket: a; words:\n     " + "x" * 30 + "; ms:\n     1.5\n" in as_text(result, 40)
    assert as_text(result, 200) == as_text(result)


def test_text_keeps_to_the_terminal_and_breaks_no_path():
    path = "/opt/" + "deep/" * 30 + "model.py:123"
    text = as_text(Result("graph", problems=[replace(PROBLEM, where=path, change="do it " * 40)]), 80)
    assert path in text
    assert all(len(line) <= 80 for line in text.splitlines() if path not in line)


def test_text_from_outside_cannot_reach_the_terminal():
    evil = "a\x1b[31mb\nc"
    result = Result(
        "graph",
        evil,
        evil,
        [Problem(evil, evil, evil, evil, evil, evil, facts={evil: evil})],
        [Fact("a", 1, evil)],
        [Table(evil, (evil,), ((evil,),))],
        [Missing(evil, evil)],
        evil,
        evil,
    )
    assert "\x1b" not in as_text(result)
    assert headline(result.problems[0]) == "a?[31mb?c (a?[31mb?c)"
