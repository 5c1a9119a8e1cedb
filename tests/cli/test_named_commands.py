"""Commands that findings, reasons and screens name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import opusmon
from opusmon.cli.arguments import parser

SOURCES = sorted(Path(opusmon.__file__).parent.rglob("*.py"))
NAMED = sorted(
    {found for path in SOURCES for found in re.findall(r"`opusmon ([^`{]*)`", path.read_text("utf-8"))}
)


def test_the_commands_are_found() -> None:
    assert "triage FILE --scenarios" in NAMED
    assert "doctor" in NAMED


@pytest.mark.parametrize("command", NAMED)
def test_a_command_that_is_named_is_there(command: str) -> None:
    """Its verb, and every option behind it."""
    _, verbs = parser()
    words = command.split()
    verb = "live" if words[0].startswith("-") else words[0]
    assert verb in verbs
    known = verbs[verb].format_help()
    assert [word for word in words if word.startswith("--") and not re.search(rf"{word}\b", known)] == []
