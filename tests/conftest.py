"""What all tests share: signals as in a terminal, and which of them may run side by side."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler.loadscope import LoadScopeScheduling

MOST_AT_ONCE = 4
"""However many cores there are: each process loads torch, and what tests start comes on top."""

PROBES = (
    "tests/cli/test_calibrate",
    "tests/cli/test_cli",
    "tests/cli/test_live",
    "tests/cli/test_record_requests",
    "tests/cli/test_sudo",
    "tests/collectors/test_libbpf",
    "tests/collectors/test_stalls",
    "tests/collectors/test_streams",
    "tests/test_calibrate",
)
"""How the names of files begin whose tests set probes on libcuda, or run an opusmon that does.

One after the other: the processes of every test hit such a probe, and these tests say how many there are and what a
call costs.
"""


def pytest_configure() -> None:
    """Let what tests start find it as in a terminal.

    Under nohup, or behind a script, it would ignore signals; beside others it would be told of 80 columns.
    """
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # what is started begins with the default again


def together(nodeid: str) -> str:
    """Name of the group that a test is in; the tests of a group run one after the other, in one process."""
    file = nodeid.partition("::")[0]
    return "probes" if file.startswith(PROBES) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes `-n auto` takes."""
    return min(os.cpu_count() or 1, MOST_AT_ONCE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Hand out groups; the mark `xdist_group` is without effect in pytest 9.2 with pytest-xdist 3.8."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Together(config, log)
