"""A result as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from opusmon.checks.result import Problem, Result, Table, Value
from opusmon.text import hanging, printable

_WIDTH = 100
_SIGNS = {"problem": "!!", "note": "i"}
_INDENT = " " * 3


def as_text(result: Result) -> str:
    """Verdict, problems with their lines, then facts, tables and what was not measured."""
    return "\n".join(_lines(result)) + "\n"


def verdict(result: Result) -> str:
    """`2 problems`, `clean`, or why it could not run."""
    if result.error:
        return f"could not run: {result.error}"
    problems = sum(problem.level == "problem" for problem in result.problems)
    if not problems:
        return "clean"
    return f"{problems} problem{'s' if problems != 1 else ''}"


def headline(problem: Problem) -> str:
    """A problem on one line, for a mark: what, and where."""
    return printable(f"{problem.what} ({problem.where})" if problem.where else problem.what)


def _lines(result: Result) -> Iterator[str]:
    yield from hanging("", f"check {result.check} {result.target}".rstrip() + f": {verdict(result)}", _WIDTH)
    if result.basis:
        yield from hanging(f"{_INDENT}basis: ", result.basis, _WIDTH)
    if result.remedy:
        yield from hanging(f"{_INDENT}fix: ", result.remedy, _WIDTH)
    for problem in result.problems:
        yield ""
        yield from _problem(problem)
    if result.facts:
        yield ""
        for fact in result.facts:
            yield from hanging(f"{_INDENT}- ", fact.text, _WIDTH)
    for table in result.tables:
        yield ""
        yield from _table(table)
    if result.not_measured:
        yield ""
        for missing in result.not_measured:
            yield from hanging(f"{_INDENT}not measured: ", f"{missing.what}: {missing.why}", _WIDTH)


def _problem(problem: Problem) -> Iterator[str]:
    place = f"{problem.where}  " if problem.where else ""
    yield from hanging(f"{_SIGNS[problem.level]:<3}", f"{place}{problem.what}  [{problem.kind}]", _WIDTH)
    if problem.line:
        yield from hanging(f"{_INDENT}> ", problem.line, _WIDTH)
    if problem.code:
        yield from hanging(f"{_INDENT}said: ", problem.code, _WIDTH)
    if problem.facts:
        yield from hanging(
            _INDENT, ", ".join(f"{name} {_cell(value)}" for name, value in problem.facts.items()), _WIDTH
        )
    if problem.change:
        yield from hanging(f"{_INDENT}change: ", problem.change, _WIDTH)


def _table(table: Table) -> Iterator[str]:
    rows = [
        [printable(name) for name in table.columns],
        *([_cell(value) for value in row] for row in table.rows),
    ]
    numeric = [
        all(isinstance(row[place], int | float) or row[place] is None for row in table.rows)
        for place in range(len(table.columns))
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    yield printable(table.title)
    for row in rows:
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
