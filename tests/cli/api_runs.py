"""Runs of the command line that have to do with requests, and what they leave: nothing secret."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from opusmon.recording import Recording

KEY = "sk-ant-PLANTED-hunter2"
ASKED = {
    "model": "claude-test-1",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "SECRET-PROMPT"}],
}
LIMIT_S = 60
LOCAL = "http://127.0.0.1:9"
"""Where nobody listens."""


@dataclass
class Done:
    """A process that has ended."""

    status: int | None
    out: str
    err: str

    @property
    def problem(self) -> str:
        """The last line of one that failed, or whose words could not be used."""
        assert self.status in (1, 2), (self.status, self.out, self.err)
        assert "Traceback" not in self.err
        return self.err.splitlines()[-1].removeprefix("opusmon: ")


def environment(folder: Path) -> dict[str, str]:
    """Of a user who has a key, and proxies and base URLs of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {
        **kept,
        "ANTHROPIC_API_KEY": KEY,
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }


async def start(folder: Path, *words: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "opusmon", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(folder),
    )


async def ended(process: asyncio.subprocess.Process) -> Done:
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    return Done(process.returncode, out.decode(), err.decode())


async def opusmon(folder: Path, *words: object) -> Done:
    return await ended(await start(folder, *words))


@contextlib.asynccontextmanager
async def running(folder: Path, *words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is killed if the test has not ended it."""
    process = await start(folder, *words)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
        return port


async def kept(path: Path, ready: Callable[[], object]) -> None:
    """Wait until a recording that is being written holds something."""
    async with asyncio.timeout(LIMIT_S):
        while not (recordings(path.parent) and ready()):  # noqa: ASYNC110  (another process writes it)
            await asyncio.sleep(0.05)


async def listening(port: int) -> None:
    """Wait until somebody answers there."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.02)


def recordings(folder: Path) -> list[str]:
    """Names of the recordings somewhere in a folder, and of what SQLite leaves beside them."""
    return [path.name for path in folder.rglob("*.opusmon*")]


def rows(path: Path, channel: str) -> list[dict[str, object]]:
    """Rows of a recording with their texts."""
    with Recording.open(path) as recording:
        if channel not in recording.channels:
            return []
        texts = {field.name for field in recording.channels[channel].fields if field.text}
        found = recording.query(channel, recording.t0 - 1, recording.t1)
        names = found.dtype.names or ()
        return [
            {name: recording.strings.text(row[name]) if name in texts else row[name].item() for name in names}
            for row in found
        ]


def nowhere(secret: str, path: Path, *texts: str) -> None:
    """A secret is neither in a recording, its texts and raw bytes included, nor in what was printed."""
    with Recording.open(path) as recording:
        kept = [text for _, text in recording.strings.since(0)]
        assert not [text for text in kept if secret in text]
        assert not [value for value in recording.session.values() if secret in value]
    assert secret.encode() not in path.read_bytes()
    nowhere_in(secret, *texts)


def nowhere_in(secret: str, *texts: str) -> None:
    assert not [text for text in texts if secret in text]
