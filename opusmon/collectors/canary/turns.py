"""A few requests one after another, for a look at an endpoint by hand."""

from __future__ import annotations

from collections.abc import Callable

from opusmon.clock import Clock, SystemClock
from opusmon.collectors.api.request import Request
from opusmon.collectors.canary.collector import cost
from opusmon.collectors.canary.endpoint import CanaryConfig, CanaryRefused, check, who_pays
from opusmon.collectors.canary.prompt import bound, prompt
from opusmon.text import counted

MOST = 1000


def announce_count(config: CanaryConfig, count: int) -> str:
    """One line that says what so many requests will spend at most, and with whose key, before they start.

    Raises:
        CanaryRefused: they are none, or too many.
    """
    check_count(count)
    most = min(config.hourly_tokens, count * (bound(config.prompt_tokens) + config.max_tokens))
    return (
        f"probe: {config.model} at {config.host}, {counted(count, 'request')} one after another,"
        f" at most {most:,} tokens, {who_pays(config)}"
    )


def check_count(count: int) -> None:
    """Refuse a number of requests that cannot be meant.

    Raises:
        CanaryRefused: they are none, or too many.
    """
    if not 1 <= count <= MOST:
        raise CanaryRefused(f"{count} requests", f"give 1 to {MOST}")


async def ask_in_turn(
    config: CanaryConfig,
    count: int,
    *,
    clock: Clock | None = None,
    on_request: Callable[[Request], None] | None = None,
) -> tuple[list[Request], str]:
    """Send requests one after another; their clocks start when each was sent, connecting left out.

    Args:
        config: what to ask; `hourly_tokens` is the cap for all of them together.
        count: how many, at most 1000.
        clock: times of the rows.
        on_request: is told each request as it ends.

    Returns:
        The requests, and why there are fewer than asked for ("" when there are not).

    Raises:
        CanaryRefused: the configuration is not one to run with.
    """
    config = check(config)
    check_count(count)
    from opusmon.collectors.canary.exchange import Client  # 40 MB; not before it is needed
    from opusmon.collectors.canary.warmup import warm_up

    clock = clock or SystemClock()
    await warm_up(config, clock)
    client, done, spent = Client(config, clock), list[Request](), 0
    most = bound(config.prompt_tokens) + config.max_tokens
    try:
        for number in range(1, count + 1):
            if spent + most > config.hourly_tokens:
                return done, f"{spent:,} of {config.hourly_tokens:,} tokens are spent"
            request = await client.ask(prompt(config.prompt_tokens), number)
            charged = cost(request, most)
            spent, most = spent + charged, max(most, charged)
            done.append(request)
            if on_request is not None:
                on_request(request)
    finally:
        await client.close()
    return done, ""
