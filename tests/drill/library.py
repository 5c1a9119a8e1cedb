"""The library: every scenario by name, with the cause that was planted and how it may be told."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from drill.host import Host

AT = 300
"""Second at which a cause begins, unless a scenario says otherwise."""


@dataclass(frozen=True)
class Scenario:
    """A session with a known cause.

    Attributes:
        name: of the scenario.
        rule: that must give the top finding; "" where nothing is wrong.
        subject: part of that finding's subject.
        at: second at which the cause begins.
        until: second at which it ends, the end of the session by default.
        order: what moves, in this order: seconds after `at` (None where that follows from the model), channel, and subject
            (or nothing) and beginning of the quantity, or the kind of event.
        allowed: rules whose notes are true of a quiet session.
        beside: rules that find something else as well, which is true and not the cause.
    """

    name: str
    make: object
    rule: str
    subject: str
    at: int
    until: int | None
    order: tuple
    seconds: int
    per_s: float
    seed: int
    allowed: tuple
    beside: tuple

    def host(self, seed=None):
        """The session as made, before it becomes a view."""
        host = Host(self.seconds, seed=self.seed if seed is None else seed, per_s=self.per_s)
        steps = self.make(host)
        next(steps)
        host.lay_out()
        assert next(steps, None) is None
        return host


SCENARIOS: dict[str, Scenario] = {}


def planted(rule, subject="", *, at=AT, until=None, order=(), seconds=600, per_s=2.0, allowed=(), beside=()):
    """Register a scenario: a generator that changes the demand, yields, and changes what was laid out."""

    def register(make):
        SCENARIOS[make.__name__] = Scenario(
            make.__name__, make, rule, subject, at, until, tuple(order), seconds, per_s, crc32(make.__name__.encode()), tuple(allowed),
            tuple(beside),
        )  # fmt: skip
        return make

    return register
