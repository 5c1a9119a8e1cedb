"""What tests of the screen share."""

import time

import pytest


@pytest.fixture
def utc(monkeypatch):
    """The clock on the wall is UTC's."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
