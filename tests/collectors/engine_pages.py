"""Real metrics pages of engines, and the same a while later."""

from __future__ import annotations

from pathlib import Path

from opusmon.clock import NS
from opusmon.collectors.engine.deltas import Deltas
from opusmon.collectors.engine.figures import Figures, collapse, figures
from opusmon.collectors.engine.kinds import WANTED, recognise
from opusmon.collectors.engine.page import Reader
from opusmon.collectors.engine.vocabulary import counters

PAGES = Path(__file__).parents[1] / "data" / "engine_pages"
ENGINE_PAGES = sorted(path.stem for path in PAGES.glob("*.prom") if not path.stem.startswith("dcgm"))


class Everything:
    """Every name is wanted."""

    def __contains__(self, name: object) -> bool:
        return True


def page(name: str) -> str:
    return (PAGES / f"{name}.prom").read_text()


def grown(text: str, *gains: tuple[str, float]) -> str:
    """The page a while later: every sample that begins with the text has grown by the number."""
    lines = []
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        more = sum(gain for start, gain in gains if line.startswith(start))
        lines.append(f"{head} {float(value) + more}" if more else line)
    return "\n".join(lines) + "\n"


def window(first: str, second: str, dt_ns: int = NS) -> list[Figures]:
    """Figures of the second page, after the first."""
    kind = recognise(Reader(WANTED).read(first).names)
    assert kind is not None
    deltas, entries = Deltas(counters(kind)), []
    for text in (first, second):
        samples = collapse(Reader(WANTED).read(text).samples, kind.copy_labels)
        entries = figures(kind, samples, deltas.advance(samples), dt_ns)
    return entries


def observed(name: str, labels: str, edges: str, amount: float, seconds: float) -> list[tuple[str, float]]:
    """Gains of a histogram: `amount` observations in the bucket whose edges, and all above, are given."""
    tops = [(f'{name}_bucket{{{labels}le="{edge}"}}', amount) for edge in edges.split()]
    closed = "{" + labels.rstrip(",") + "}" if labels else ""
    return [*tops, (f"{name}_count{closed} ", amount), (f"{name}_sum{closed} ", seconds)]
