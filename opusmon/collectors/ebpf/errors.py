"""What is raised where probes cannot be set."""

from __future__ import annotations

from opusmon.collectors.base import Unavailable


class ProbesUnavailable(Exception):  # noqa: N818  (it reads as what happened)
    """Probes in the kernel cannot be used here, or stopped working as a whole.

    Attributes:
        why: reason and remedy.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.why = Unavailable(reason, remedy)
