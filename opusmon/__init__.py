"""opusmon: a terminal monitor and flight recorder for hosts that serve LLMs."""

__version__ = "0.1.0"
