"""Inference engines: what they say about themselves on their metrics pages."""

from opusmon.collectors.engine.collector import EngineCollector

__all__ = ["EngineCollector"]
