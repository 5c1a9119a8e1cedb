"""What is raised where probes cannot be set."""

from __future__ import annotations

from opusmon.collectors.base import UnavailableError


class ProbesUnavailable(UnavailableError):  # noqa: N818  (it reads as what happened)
    """Probes in the kernel cannot be used here, or stopped working as a whole."""
