"""Root for one child process, by way of sudo; the screen itself stays what it is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence


class SudoRefused(Exception):  # noqa: N818  (it reads as what happened)
    """sudo is not there, or did not let us; the text is one line that says what to do."""


def ask() -> None:
    """Let sudo ask for the password now, on the terminal, before a screen covers it.

    Raises:
        SudoRefused: there is no sudo, or it said no.
    """
    path = shutil.which("sudo")
    if path is None:
        raise SudoRefused("--sudo: there is no sudo on this host; start opusmon as root instead")
    done = subprocess.run([path, "-v", "-p", "opusmon: password of %u for the eBPF probes: "], check=False)
    if done.returncode != 0:
        raise SudoRefused("--sudo: sudo refused; leave --sudo out to watch without the eBPF probes")


def command(argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` as root without asking again."""
    return [shutil.which("sudo") or "sudo", "-n", "--", *argv]
