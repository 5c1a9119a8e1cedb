"""A result as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from opusmon.checks.result import Problem, Result, Table, Value
from opusmon.text import counted, hanging, printable

_WIDTH = 100
"""Widest text, columns."""

_SIGNS = {"problem": "!!", "note": "i"}
_INDENT = " " * 3


def as_text(result: Result, columns: int | None = None) -> str:
    """Verdict, problems with their lines, then facts, tables and what was not measured.

    Args:
        result: of a check.
        columns: of the terminal, None where there is none: tables are then as wide as they are.
    """
    return "\n".join(_lines(result, columns)) + "\n"


def verdict(result: Result) -> str:
    """`2 problems`, `clean`, or why it could not run; what is clean without having been measured says so."""
    if result.error:
        return f"could not run: {result.error}"
    problems = sum(problem.level == "problem" for problem in result.problems)
    if not problems:
        return "clean (static)" if result.basis.startswith("static") else "clean"
    return counted(problems, "problem")


def headline(problem: Problem) -> str:
    """A problem on one line, for a mark: what, and where."""
    return printable(f"{problem.what} ({problem.where})" if problem.where else problem.what)


def _lines(result: Result, columns: int | None) -> Iterator[str]:
    width = min(_WIDTH, columns or _WIDTH)
    title = f"check {result.check} {result.target}".rstrip()
    yield from hanging("", f"{title}: {verdict(result)}", width, whole_words=True)
    if result.basis:
        yield from _wrapped("basis: ", result.basis, width)
    if result.remedy:
        yield from _wrapped("fix: ", result.remedy, width)
    for problem in sorted(result.problems, key=lambda one: one.level != "problem"):
        yield ""
        yield from _problem(problem, width)
    if result.facts:
        yield ""
        for fact in result.facts:
            yield from _wrapped("- ", fact.text, width)
    for table in result.tables:
        yield ""
        yield from _table(table, columns)
    if result.not_measured:
        yield ""
        for missing in result.not_measured:
            yield from _wrapped("not measured: ", f"{missing.what}: {missing.why}", width)


def _problem(problem: Problem, width: int) -> Iterator[str]:
    place = f"{problem.where}  " if problem.where else ""
    what = f"{place}{problem.what}  [{problem.kind}]"
    yield from hanging(f"{_SIGNS[problem.level]:<3}", what, width, whole_words=True)
    if problem.line:
        yield from _wrapped("> ", problem.line, width)
    if problem.code:
        yield from _wrapped("said: ", problem.code, width)
    if problem.facts:
        facts = ", ".join(f"{name} {_cell(value)}" for name, value in problem.facts.items())
        yield from _wrapped("", facts, width)
    if problem.change:
        yield from _wrapped("change: ", problem.change, width)


def _table(table: Table, columns: int | None) -> Iterator[str]:
    """Rows below their columns; where these are wider than the terminal, each row as a paragraph."""
    names = [printable(name.replace("_", " ")) for name in table.columns]
    rows = [[_cell(value) for value in row] for row in table.rows]
    numeric = [
        all(isinstance(row[place], int | float) or row[place] is None for row in table.rows)
        for place in range(len(table.columns))
    ]
    widths = [max(len(row[place]) for row in [names, *rows]) for place in range(len(table.columns))]
    yield printable(table.title)
    if columns is not None and len(_INDENT) + sum(widths) + 2 * (len(widths) - 1) > columns:
        for row in rows:
            pairs = zip(names, row, strict=True)
            yield from _wrapped("* ", "; ".join(f"{name}: {cell}" for name, cell in pairs), columns)
        return
    for row in [names, *rows]:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        yield _INDENT + "  ".join(cells).rstrip()


def _cell(value: Value) -> str:
    """A value in a table or a list; what is missing is a dash."""
    if value is None:
        return "--"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return printable(value)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return hanging(_INDENT + head, text, width, whole_words=True)
