"""Recordings made on real hosts, for tests; each has what its load counted beside it."""

from pathlib import Path

DATA = Path(__file__).parent / "data"


def h200x2() -> Path:
    """Two H200s under copies, peer traffic and matmul, without probes: h200x2-load.json."""
    return DATA / "h200x2.opusmon"
