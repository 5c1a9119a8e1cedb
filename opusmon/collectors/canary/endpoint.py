"""Where a canary may send requests, with whose key, and what it will spend there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, urlsplit

from opusmon.clock import NS
from opusmon.collectors.base import Unavailable
from opusmon.loopback import is_loopback

PATH = "/v1/messages"
PER_HOUR_MOST = 3600.0
PLACEHOLDER = "local-engine-needs-no-key"
"""Sent where the environment has no key: engines on the host want the header, not its content."""
TIMEOUT_S = 120.0

_SECRETS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS")


class CanaryRefused(Exception):  # noqa: N818  (it reads as what happened)
    """The configuration is not one a canary runs with.

    Attributes:
        why: reason and remedy.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.why = Unavailable(reason, remedy)


@dataclass(frozen=True)
class CanaryConfig:
    """What to ask, where, and how often; see `check`.

    Attributes:
        base_url: of the Messages API, without /v1/messages: https://api.anthropic.com, http://127.0.0.1:8000.
        model: as the server names it.
        per_hour: requests per hour, a hard cap; they are sent evenly spaced.
        max_tokens: most tokens of an answer.
        prompt_tokens: length of the prompt, about.
        hourly_tokens: hard cap on prompt and answer tokens in any hour.
        timeout_s: a request that takes longer is given up.
        env: environment variables; only the key is read.
    """

    base_url: str
    model: str
    per_hour: float = 12
    max_tokens: int = 16
    prompt_tokens: int = 64
    hourly_tokens: int = 6000
    timeout_s: float = TIMEOUT_S
    env: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False, compare=False)

    @property
    def slot_ns(self) -> int:
        """Time between two requests."""
        return int(3600 * NS / self.per_hour)

    @property
    def host(self) -> str:
        """Host and port for display, nothing else of the URL."""
        parts = urlsplit(self.base_url)
        port = f":{parts.port}" if parts.port else ""
        name = parts.hostname or ""
        return f"[{name}]{port}" if ":" in name else f"{name}{port}"

    def key(self) -> tuple[str | None, str | None]:
        """API key and bearer token of the environment; exactly one of them is text."""
        if api_key := self.env.get(_SECRETS[0]):
            return api_key, None
        if token := self.env.get(_SECRETS[1]):
            return None, token
        return PLACEHOLDER, None


def check(config: CanaryConfig) -> CanaryConfig:
    """The configuration, with its address in normal form.

    Raises:
        CanaryRefused: it lacks something, could leak a key, or asks too much.
    """
    parts = _address(config.base_url)
    if not config.model:
        raise CanaryRefused("no model to ask", "name one with --probe-model, as the server calls it")
    if parts.scheme == "http" and not is_loopback(parts.hostname or "") and _has_secret(config.env):
        raise CanaryRefused(
            f"plain http to {config.host} would show the key of the environment to the network",
            f"use https, or unset {', '.join(_SECRETS)}",
        )
    _amounts(config)
    path = parts.path.rstrip("/")
    path = path.removesuffix(PATH).removesuffix("/v1")
    url = f"{parts.scheme}://{parts.netloc}{path}"
    return replace(config, base_url=url)


def announce(config: CanaryConfig) -> str:
    """One line that says what the canary will spend at most, before it starts."""
    return (
        f"canary: {config.model} at {config.host}, at most {config.per_hour:g} requests and"
        f" {config.hourly_tokens:,} tokens an hour (one every {config.slot_ns / NS:.4g} s, each about"
        f" {config.prompt_tokens} tokens in and up to {config.max_tokens} out), {who_pays(config)}"
    )


def who_pays(config: CanaryConfig) -> str:
    """With whose key, by the name of its variable."""
    api_key, token = config.key()
    if token is not None:
        return f"with the token of {_SECRETS[1]}"
    return "without a key" if api_key == PLACEHOLDER else f"with the key of {_SECRETS[0]}"


def _address(url: str) -> SplitResult:
    if not url:
        raise CanaryRefused(
            "no endpoint to ask", "name one with --base-url, for example http://127.0.0.1:8000"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise CanaryRefused(
            "the endpoint is not an address", "write http://HOST:PORT or https://HOST"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise CanaryRefused("the endpoint is not an http address", "write http://HOST:PORT or https://HOST")
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise CanaryRefused("the endpoint's address holds credentials", f"remove them and set {_SECRETS[0]}")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise CanaryRefused("the endpoint's address has a query", "remove everything from ? on")
    if any(ord(char) <= 0x20 or ord(char) == 0x7F for char in url):
        raise CanaryRefused("the endpoint's address has blanks or control characters", "write it without")
    return parts


def _has_secret(env: Mapping[str, str]) -> bool:
    return any(env.get(name) for name in _SECRETS)


def _amounts(config: CanaryConfig) -> None:
    if not 0 < config.per_hour <= PER_HOUR_MOST:
        raise CanaryRefused(
            f"{config.per_hour:g} requests an hour", f"give more than 0, {PER_HOUR_MOST:g} at most"
        )
    for name in ("max_tokens", "prompt_tokens", "hourly_tokens"):
        if getattr(config, name) < 1:
            raise CanaryRefused(f"{name.replace('_', ' ')} of {getattr(config, name)}", "give 1 or more")
    if not 0 < config.timeout_s <= 3600:
        raise CanaryRefused(f"a timeout of {config.timeout_s:g} s", "give at most 3600")
