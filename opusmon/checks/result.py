"""What a check says: problems with their places, facts, tables, and what was not measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FORMAT = 1
"""Version of the JSON document; it grows when a key changes its meaning, not when one is added."""

Level = Literal["problem", "note"]
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that keeps the code off the fast path.

    Attributes:
        kind: stable name for programs, as `item` or `graph_break`.
        what: one sentence.
        where: `file.py:12` of the user's own code, "" when no line can be named.
        line: that line, stripped.
        code: what CUDA or torch said, as `900 not permitted while a stream is capturing`; "" when nothing did.
        change: what to do about it, "" when nothing is known.
        level: `problem` gives exit status 3, `note` does not.
        facts: the numbers behind it, by name with unit.
    """

    kind: str
    what: str
    where: str = ""
    line: str = ""
    code: str = ""
    change: str = ""
    level: Level = "problem"
    facts: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fact:
    """A measured or computed value.

    Attributes:
        name: with its unit, as `replay_ms`.
        value: a number or a word.
        text: the same for people, as `replay 0.31 ms (median of 50)`.
    """

    name: str
    value: Value
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people and programs; every row has one value per column.

    Attributes:
        title: for people.
        columns: names for programs, each once, with its unit, as `eager_ms`; people read spaces in them.
        rows: shape (n, columns).
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that was not measured, and why."""

    what: str
    why: str


@dataclass(slots=True)
class Result:
    """All that one check found.

    Attributes:
        check: its name, as `graph`.
        target: what was checked.
        basis: what the statements rest on: `static, without a GPU`, or the device, driver and torch.
        error: why it could not run, "" when it did; what was found before that stands all the same.
        remedy: the command or step that makes it run.
    """

    check: str
    target: str = ""
    basis: str = ""
    problems: list[Problem] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    not_measured: list[Missing] = field(default_factory=list)
    error: str = ""
    remedy: str = ""

    @property
    def clean(self) -> bool:
        """Nothing of level `problem`."""
        return not any(problem.level == "problem" for problem in self.problems)


def one_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def to_json(result: Result) -> dict[str, Any]:
    """The document of `--json`; NaN and infinities become null."""
    document: dict[str, Any] = _finite({"format": FORMAT, **asdict(result)})
    return document


def from_json(document: dict[str, Any]) -> Result:
    """A result of a child process.

    Raises:
        KeyError, TypeError: it is none.
    """
    return Result(
        check=str(document["check"]),
        target=str(document["target"]),
        basis=str(document["basis"]),
        problems=[Problem(**problem) for problem in document["problems"]],
        facts=[Fact(**fact) for fact in document["facts"]],
        tables=[
            Table(str(table["title"]), tuple(table["columns"]), tuple(tuple(row) for row in table["rows"]))
            for table in document["tables"]
        ],
        not_measured=[Missing(**missing) for missing in document["not_measured"]],
        error=str(document["error"]),
        remedy=str(document["remedy"]),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
