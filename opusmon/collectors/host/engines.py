"""Well-known inference servers by the name of their processes.

Only the name, and where that is an interpreter's the program or module it runs, are looked at; nothing of a command
line is kept. All processes are looked at over some turns, new ones first, so that a turn is cheap on any host.
Reading a command line can wait for ever when the process is stuck in a page fault: call this on a thread that may
be left behind.
"""

from __future__ import annotations

import os
import re
from itertools import chain

from opusmon.collectors.host.files import read_short
from opusmon.collectors.host.processes import parse_stat
from opusmon.collectors.missing import Missing

MAX_LOOKS = 200
"""Processes looked at in a turn; one look takes 10 to 20 us."""
_KTHREADD = 2
_HEAD_B = 1024

_ENGINE = re.compile(
    r"(vllm|sglang|trtllm|tensorrt_llm|tritonserver|text-generation|text-embeddings|llama-server|ollama"
    r"|lmdeploy|mlc_llm|aphrodite|lorax|exllama|tabbyapi|koboldcpp|localai|mistralrs|transformers"
    r"|ray::RayWorker|llama_cpp)(?![a-z])",
    re.IGNORECASE,
)
"""How the names of engines, their launchers and their workers (VLLM::EngineCore, sglang::scheduler) begin."""
_INTERPRETER = re.compile(r"python|pypy|pt_main_thread")
"""torch renames the main thread of a worker to pt_main_thread."""


def is_engine(name: str) -> bool:
    """Whether a process, program or module of this name is an inference server or part of one."""
    return _ENGINE.match(name) is not None


def program(command_line: bytes) -> str:
    """What an interpreter runs: the module after -m, or the base name of the first argument that is no option.

    Args:
        command_line: the head of /proc/PID/cmdline. Only its first four words are looked at.
    """
    words = [word.decode("utf-8", "replace") for word in command_line.split(b"\0")[1:5]]
    for place, word in enumerate(words):
        if word == "-m":
            return words[place + 1] if place + 1 < len(words) else ""
        if word == "-c":
            return ""
        if word and not word.startswith("-"):
            return word.rsplit("/", 1)[-1]
    return ""


class Engines:
    """Finds the processes of inference servers, a part of all processes at each call.

    Args:
        proc: the /proc folder.

    Attributes:
        found: pid to start time (clock ticks since boot).
        hidden: processes of other users cannot be seen.
    """

    def __init__(self, proc: str) -> None:
        self.found: dict[int, int] = {}
        self.hidden = False
        self._proc = proc
        self._known: set[int] = set()
        self._next = 0

    def look(self) -> dict[int, int]:
        """Look at the new processes and at some of the others; `found` as it is then."""
        pids = self._pids()
        here = set(pids)
        self.hidden = 1 not in here
        fresh = [pid for pid in pids if pid not in self._known]
        old = [pid for pid in pids if pid in self._known]
        turned = old[self._next :] + old[: self._next]
        chosen = list(chain(fresh, turned))[:MAX_LOOKS]
        self._next = (self._next + max(0, len(chosen) - len(fresh))) % max(1, len(old))
        self._known = (self._known & here) | set(chosen)
        self.found = {pid: started for pid, started in self.found.items() if pid in here}
        for pid in chosen:
            self._judge(pid)
        return dict(self.found)

    def _pids(self) -> list[int]:
        try:
            with os.scandir(self._proc) as entries:
                return [int(entry.name) for entry in entries if entry.name.isdigit()]
        except OSError:
            return []

    def _judge(self, pid: int) -> None:
        text = read_short(f"{self._proc}/{pid}/stat")
        stat = None if isinstance(text, Missing) else parse_stat(text)
        self.found.pop(pid, None)
        if stat is None or stat.parent == _KTHREADD:
            return
        if is_engine(stat.comm) or (_INTERPRETER.match(stat.comm) and is_engine(self._program(pid))):
            self.found[pid] = stat.started

    def _program(self, pid: int) -> str:
        text = read_short(f"{self._proc}/{pid}/cmdline", _HEAD_B)
        return "" if isinstance(text, Missing) else program(text)
