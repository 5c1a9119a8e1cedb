"""Conclusions from what was measured: pure functions over rows, the same live, in replay and in tests."""
