"""Why no engine was found, in words that lead to one."""

from __future__ import annotations

from opusmon.collectors.base import Unavailable
from opusmon.collectors.engine.discover import View
from opusmon.collectors.engine.kinds import BY_NAME

_NAME_IT = (
    "Name it: --engine http://HOST:PORT"
    " (SGLang has metrics with --enable-metrics, llama.cpp with --metrics, TensorRT-LLM with return_perf_metrics)"
)


def nothing(view: View) -> Unavailable:
    """The likeliest reason, and what to do."""
    for one in view.remote:
        place = f"{one.listener.host}:{one.listener.port}"
        if ":" in one.listener.host:
            place = f"[{one.listener.host}]:{one.listener.port}"
        return Unavailable(
            f"{BY_NAME[one.kind].title} listens on {place} only; engines are looked for on loopback only",
            f"Name it: --engine http://{place}",
        )
    seen = {one.kind for one in view.candidates}
    for program in view.programs:
        if program.kind not in seen:
            return Unavailable(
                f"{BY_NAME[program.kind].title} runs (pid {program.pid}), but no port of it can be seen from here:"
                " it may be in a container, or still load its model",
                "Name it: --engine http://ADDRESS:PORT, with the address of the container",
            )
    return Unavailable(_asked(view), _NAME_IT)


def _asked(view: View) -> str:
    number = len(view.candidates)
    if not number:
        reason = "nothing that listens on this host looks like an inference engine"
    else:
        ports = "one likely port" if number == 1 else f"{number} likely ports"
        reason = f"this host has {ports}, and no metrics of an inference engine there"
    hidden = (
        f"; the sockets of {view.hidden} likely processes are hidden from this user" if view.hidden else ""
    )
    return reason + hidden
