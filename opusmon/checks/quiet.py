"""Torch's own remarks are none of the report's. Imported in the child only."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet(options: Mapping[str, Any]) -> Iterator[None]:
    """While it lasts, what torch logs and warnings stay away from stderr, unless `debug` is among the options."""
    if options.get("debug"):
        yield
        return
    loud = logging.getLogger("torch")
    level = loud.level
    loud.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        loud.setLevel(level)
