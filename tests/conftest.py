"""What all tests share: which of them may run side by side.

`pytest -n 2` runs files beside each other, the tests of one file in order. Files marked `needs.PROBES` run one after
the other: a probe on libcuda is hit by the processes of every test, and those tests say how many there are and what
a call costs.
"""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known where pytest-xdist, which brings it, is not installed; and take signals as in a terminal.

    Under nohup, or in the background of a script, this process and all that tests start would ignore them.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # what is started begins with the default again
    config.addinivalue_line(
        "markers", "xdist_group(name): tests that run one after the other, in one process"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file are a group, if they are in no other."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
