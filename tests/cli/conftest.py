"""Fixtures of the command line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from opusmon import cli

from .api_runs import Done, environment


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a command line in a thread of this process, which has loaded the clients already."""
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    async def run(*words: object) -> Done:
        capsys.readouterr()
        status = await asyncio.to_thread(cli.main, list(map(str, words)))
        return Done(status, *capsys.readouterr())

    return run
