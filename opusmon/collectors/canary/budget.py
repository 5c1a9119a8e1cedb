"""What a canary may spend: hard caps on requests and tokens in any hour."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from opusmon.clock import NS

HOUR_NS = 3600 * NS


@dataclass(slots=True)
class _Spent:
    t: int
    tokens: int


class Budget:
    """Requests and tokens spent in the hour that ends now.

    Tokens are reserved before a request at the most it can cost and settled when the answer says what it did cost,
    so that requests in flight cannot break the cap together.

    Args:
        requests: at most so many in any hour.
        tokens: at most so many in any hour, prompt and answer together.
    """

    def __init__(self, requests: float, tokens: int) -> None:
        self._requests = requests
        self._tokens = tokens
        self._spent: OrderedDict[int, _Spent] = OrderedDict()
        self._next = 0

    def reserve(self, t: int, tokens: int) -> int | None:
        """Take room for one request at `t` (monotonic ns).

        Args:
            t: now.
            tokens: the most it can cost.

        Returns:
            A ticket for `settle`, None when a cap would be broken.
        """
        if self.short_of(t, tokens):
            return None
        self._next += 1
        self._spent[self._next] = _Spent(t, tokens)
        return self._next

    def settle(self, ticket: int, tokens: int) -> None:
        """Replace a reservation by what the request did cost; one over an hour old is forgotten already."""
        if ticket in self._spent:
            self._spent[ticket].tokens = tokens

    def short_of(self, t: int, tokens: int) -> str:
        """Which cap a request of so many tokens would break at `t`: "requests", "tokens", or "" for none."""
        self._forget(t)
        if len(self._spent) + 1 > self._requests:
            return "requests"
        return "tokens" if self.tokens(t) + tokens > self._tokens else ""

    def tokens(self, t: int) -> int:
        """Tokens spent or reserved in the hour before `t`."""
        self._forget(t)
        return sum(one.tokens for one in self._spent.values())

    def requests(self, t: int) -> int:
        """Requests sent in the hour before `t`."""
        self._forget(t)
        return len(self._spent)

    def _forget(self, t: int) -> None:
        # Half a second of grace: the slot exactly an hour later may be woken a little early.
        while self._spent and t - next(iter(self._spent.values())).t >= HOUR_NS - NS // 2:
            self._spent.popitem(last=False)
