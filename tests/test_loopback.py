"""Hosts that are this one."""

from __future__ import annotations

import pytest

from opusmon.loopback import is_loopback, names_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1", "0:0:0:0:0:0:0:1"])
def test_loopback_is_that_by_either_measure(host: str) -> None:
    assert is_loopback(host)
    assert names_loopback(host)


@pytest.mark.parametrize("host", ["app.localhost", "a.b.localhost", "localhost.", "LOCALHOST", "127.0.0.1."])
def test_names_below_localhost_are_believed_of_others_but_sent_no_key(host: str) -> None:
    assert not is_loopback(host)
    assert names_loopback(host)


OTHERS = """. 0.0.0.0 :: ::2 10.0.0.1 128.0.0.1 127.1 0x7f000001 2130706433 127.0.0.1%lo [::1]
evillocalhost 127.0.0.1.evil.example localhost.evil.example"""


@pytest.mark.parametrize("host", ["", "local host", *OTHERS.split()])
def test_nothing_else_is(host: str) -> None:
    assert not is_loopback(host)
    assert not names_loopback(host)
