"""Sessions of a host that serves an LLM, each with one known cause planted in it, and quiet ones."""
