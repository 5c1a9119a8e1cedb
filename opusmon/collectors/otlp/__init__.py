"""OTLP in: spans and events that the anthropic SDK and Claude Code send already become requests."""

from opusmon.collectors.otlp.collector import OtlpCollector, OtlpUnavailable

__all__ = ["OtlpCollector", "OtlpUnavailable"]
