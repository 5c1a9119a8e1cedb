"""What `opusmon check init` can be asked for: the command line reads this without the rest."""

from __future__ import annotations

PARTS = ("costs", "first", "open", "race", "safe", "torch")
"""What can be asked for alone: costs of first use, captures that begin too early, other threads while a capture is
open, races of threads, the safe order, and all that needs torch."""

MAX_THREADS = 60
"""Each thread has a kernel and a stage of its own."""
