"""Asks a Messages endpoint at fixed times and says how long it took."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from opusmon.channels import COST, REQUEST, REQUEST_OPEN, STATUS
from opusmon.clock import NS, Clock
from opusmon.collectors.api.request import Keeper, Request, open_batch, request_batch
from opusmon.collectors.base import MIN_INTERVAL_NS, Tick, Unavailable, every, status_batch
from opusmon.collectors.canary.budget import Budget
from opusmon.collectors.canary.endpoint import CanaryConfig, CanaryRefused, announce, check
from opusmon.collectors.canary.prompt import bound, prompt
from opusmon.collectors.cost import INTERVAL_NS as COST_NS
from opusmon.collectors.cost import CallCost, CostMeter
from opusmon.collectors.notes import Notes
from opusmon.schema import Batch, Channel, StringTable

if TYPE_CHECKING:
    from opusmon.collectors.canary.exchange import Client

AT_ONCE = 4
"""Requests side by side, when answers take longer than the time between two; a later one waits, and says so."""


class CanaryCollector:
    """A few requests an hour, evenly spaced, within hard caps. Run it in a child process: its client is large.

    A slot comes at its time whether or not the request before has ended, and the clocks of a request start at its
    slot, so that a server that stalls is seen as long as it stalls.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: how often rows are handed on; raised to 250 ms.
        only_pids: not used; an endpoint is no process.
        base_url: of the Messages API, without /v1/messages.
        model: as the server names it.
        per_hour: requests per hour, at most 3600.
        max_tokens: most tokens of an answer.
        prompt_tokens: length of the prompt, about.
        hourly_tokens: cap on prompt and answer tokens in any hour.
        timeout_s: a request that takes longer is given up.
    """

    name: ClassVar[str] = "canary"
    channels: Sequence[Channel] = (REQUEST, REQUEST_OPEN, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),  # noqa: ARG002  (the collector contract)
        *,
        base_url: str = "",
        model: str = "",
        per_hour: float = 12,
        max_tokens: int = 16,
        prompt_tokens: int = 64,
        hourly_tokens: int = 6000,
        timeout_s: float = 120.0,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._config = CanaryConfig(
            base_url, model, per_hour, max_tokens, prompt_tokens, hourly_tokens, timeout_s
        )
        self._budget = Budget(per_hour, hourly_tokens)
        self._keeper = Keeper()
        self._notes = Notes(self.name)
        self._ended: deque[Request] = deque()
        self._calls = CallCost()
        self._opened_at: int | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._most_tokens = bound(prompt_tokens) + max_tokens
        self._number = self._skipped = 0
        self._error: BaseException | None = None
        self._stop = asyncio.Event()

    @classmethod
    def probe(cls) -> Unavailable | None:
        """Whether its client is installed; None when it is."""
        if find_spec("anthropic") is None:
            return Unavailable("the anthropic package is not installed", "pip install 'anthropic>=2'")
        return None

    def stop(self) -> None:
        """End `batches` now, after the rows of requests that have ended; one still in flight is given up."""
        self._stop.set()

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of its channels until stopped or closed.

        Raises:
            CanaryRefused: the configuration is not one to run with.
        """
        self._config = check(self._config)
        if why := self.probe():
            raise CanaryRefused(why.reason, why.remedy)
        from opusmon.collectors.canary.exchange import Client  # 40 MB; not before it is needed
        from opusmon.collectors.canary.warmup import warm_up

        await warm_up(self._config, self._clock)
        client = Client(self._config, self._clock)
        meter = CostMeter(self.name, self._clock, COST_NS, self._interval_ns)
        sender = asyncio.create_task(self._send(client))
        try:
            async for tick in every(self._interval_ns, self._clock, self._stop):
                meter.late += tick.late
                if sender.done():
                    sender.result()
                for batch in self._turn(client):
                    yield batch
                if spent := meter.due([self], self.strings):
                    yield spent
            for batch in self._turn(client):
                yield batch
        finally:
            for task in (sender, *self._running):
                task.cancel()
            await asyncio.gather(sender, *self._running, return_exceptions=True)
            await client.close()

    def _turn(self, client: Client) -> list[Batch]:
        batches = []
        if self._error is not None:
            raise self._error
        if self._ended:
            batches.append(request_batch(list(self._ended), self.strings, self._keeper))
            self._ended.clear()
        self._note()
        now = self._clock.now()
        if self._opened_at is None or now - self._opened_at >= NS - self._interval_ns // 2:
            self._opened_at = now
            if waiting := client.in_flight(now):
                batches.append(open_batch(waiting, self.strings, self._keeper))
        if said := self._notes.due(now):
            batches.append(status_batch(now, said, self.strings))
        return batches

    async def _send(self, client: Client) -> None:
        """One task per slot, at absolute times."""
        room = asyncio.Semaphore(AT_ONCE)
        async for tick in every(self._config.slot_ns, self._clock):
            self._skipped += tick.missed
            self._slot(client, tick, room)

    def _slot(self, client: Client, tick: Tick, room: asyncio.Semaphore) -> None:
        now = self._clock.now()
        if len(self._running) >= 2 * AT_ONCE:
            self._skipped += 1
            return
        ticket = self._budget.reserve(now, self._most_tokens)
        self._limit_note(now)
        if ticket is None:
            return
        self._number += 1
        task = asyncio.create_task(self._ask(client, self._number, tick.due, ticket, room))
        self._running.add(task)
        task.add_done_callback(self._finished)

    async def _ask(self, client: Client, number: int, due: int, ticket: int, room: asyncio.Semaphore) -> None:
        async with room:
            text = prompt(self._config.prompt_tokens)
            request = await client.ask(text, number, due)
        spent = cost(request, self._most_tokens)
        self._budget.settle(ticket, spent)
        self._most_tokens = max(self._most_tokens, spent)  # the server may count more than was thought
        self._ended.append(request)
        self._calls.add("request", int(request.e2e_ns))

    def take_cost(self) -> CallCost:
        """Requests that ended and how long they took, since this was asked last."""
        calls, self._calls = self._calls, CallCost()
        return calls

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()

    # What it says about itself

    def _note(self) -> None:
        self._notes.put(("", "", ""), "ok", announce(self._config))
        if self._skipped:
            text = (
                f"{self._skipped} requests were not sent: {2 * AT_ONCE} were waiting, or the host was asleep"
            )
            self._notes.put(("request", "", "slots"), "sampled", text)

    def _limit_note(self, now: int) -> None:
        """Say that requests are left out, and which cap does it."""
        key = ("request", "", "budget")
        cap = self._budget.short_of(now, self._most_tokens)
        if cap != "tokens":  # the slots themselves keep to the requests
            self._notes.drop(key)
            return
        self._notes.put(
            key,
            "sampled",
            f"the cap of {self._config.hourly_tokens:,} tokens an hour is reached"
            f" ({self._budget.requests(now)} requests in the last hour): the next are left out until there is room",
            "raise hourly_tokens, or ask less often",
        )


def cost(request: Request, most: int) -> int:
    """Tokens that a request is charged: what the server counted, nothing where none was served, else the most."""
    if request.outcome == "upstream_http_error" or math.isnan(request.reused):  # refused, or never sent
        return 0
    spent = request.input_tokens + request.output_tokens
    return most if request.outcome != "ok" or math.isnan(spent) else int(spent)
