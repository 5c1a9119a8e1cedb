"""What may leave the host: numbers and names, never what looks like a key, and names only if told to.

Free text (bookmarks) never goes. A name is cut and cleaned; text that looks like a secret is withheld wherever it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opusmon.text import printable
from opusmon.triage.explain import Explanation, Step
from opusmon.triage.sequence import bound_words, change_words, event_words, time_words, until_words

WITHHELD = "(withheld)"
MAX_NAME, MAX_LINE = 48, 300

_SECRET = re.compile(
    r"""sk-[\w-]{6,} | (?:\bauthorization\s*:\s*)?\bbearer\s+\S+ | \beyJ[\w-]{8,}\S* | \b(?:AKIA|ASIA)[0-9A-Z]{10,} | \bgh[pousr]_\w{16,}
      | \bhf_\w{16,} | \bxox[abprs]-\S+ | \bglpat-\S+
      | \b[\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|cookie|authorization)[\w-]*\s*[=:]\s*\S+
      | \b(?=[\w+/-]*\d)(?=[\w+/-]*[A-Za-z])[\w+/-]{32,}={0,2}  # long random words: keys, hashes, UUIDs without end
      | \S+://\S+ | \S*\?\S*=\S*  # addresses with what they may carry""",
    re.IGNORECASE | re.VERBOSE,
)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|CUSTOM_HEADERS", re.IGNORECASE)
_MIN_SECRET = 6


def scrub(text: str, env: Mapping[str, str]) -> str:
    """Text without what looks like a secret, and without the values of the environment's secrets.

    Args:
        text: anything.
        env: environment variables; those whose name says that they hold a secret are looked for.
    """
    values = [value for name, value in env.items() if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, WITHHELD)
    return _SECRET.sub(WITHHELD, text)


@dataclass(slots=True)
class Names:
    """Stand-ins for names: `name-1`, `name-2` in the order they appear.

    Attributes:
        mask: give stand-ins; otherwise the names themselves, cut and cleaned.
        env: see `scrub`.
        given: stand-in to name.
    """

    mask: bool
    env: Mapping[str, str]
    given: dict[str, str] = field(default_factory=dict)

    def named(self, text: str, names: Sequence[str]) -> str:
        """The text with stand-ins, or cleaned names, in its places."""
        return text.format(*(self._shown(name) for name in names))

    def withheld(self, text: str, names: Sequence[str]) -> str:
        """The text without the names: they are free text."""
        return text.format(*(WITHHELD for _ in names))

    def _shown(self, name: str) -> str:
        if name in _OWN:
            return name
        if not self.mask:
            # A process may put its arguments into its name: only the first word of it is a name.
            first = (printable(name).split() or ["?"])[0]
            return scrub(first, self.env)[:MAX_NAME]
        for stand_in, known in self.given.items():
            if known == name:
                return stand_in
        stand_in = f"name-{len(self.given) + 1}"
        self.given[stand_in] = name
        return stand_in


_OWN = frozenset({"", "proxy", "canary", "otlp"})
"""Names that are opusmon's own words."""


def evidence(told: Explanation, names: Names) -> dict[str, str]:
    """The lines that may be sent, by the mark to cite them by: `E1`, `E2`, ..., in the order of time."""
    texts = [text for step in told.steps for text in _step(told, step, names)]
    texts += [f"moved less: {change_words(one, names.named)}" for one in told.more[:6]]
    return {f"E{n}": scrub(printable(text), names.env)[:MAX_LINE] for n, text in enumerate(texts, 1)}


def _step(told: Explanation, step: Step, names: Names) -> Iterator[str]:
    at = f"{time_words(told, step)} {bound_words(told, step)}".strip()
    for event in step.events:
        named = names.withheld if event.kind == "mark" else names.named
        yield f"{at} event: {event_words(event, named)}"
    for change in step.changes:
        yield f"{at} {change_words(change, names.named)}{until_words(told, change)}"
