"""What results of CUDA's driver calls (`CUresult` in cuda.h) mean: as sentences, and in the few words a table holds."""

from __future__ import annotations

_CAPTURES: dict[int, tuple[str, str]] = {
    900: ("unsupported in capture", "not permitted while a stream is capturing"),
    901: ("invalidated", "invalidated by an earlier error"),
    902: ("two captures merged", "would merge two captures"),
    903: ("begun elsewhere", "this stream did not begin the capture"),
    904: ("stream not joined", "a forked stream was not joined"),
    905: ("crosses the capture", "a dependency crosses the boundary of the capture"),
    906: ("legacy stream", "implicit dependency on the legacy stream"),
    907: ("captured event", "operation on an event of the capture"),
    908: ("wrong thread", "ended by another thread than began it"),
}

CAPTURE_CODES: dict[int, str] = {code: sentence for code, (_, sentence) in _CAPTURES.items()}
"""Results 900 to 908 (CUDA_ERROR_STREAM_CAPTURE_*), with which a capture ends that fails."""

RESULTS: dict[int, str] = {
    1: "invalid value",
    2: "out of memory",
    3: "not initialized",
    4: "driver shutting down",
    34: "stub library",
    35: "driver too old",
    36: "newer driver needed",
    46: "device unavailable",
    100: "no device",
    101: "invalid device",
    200: "invalid image",
    201: "invalid context",
    209: "no binary for this GPU",
    218: "invalid PTX",
    221: "no PTX compiler",
    222: "unsupported PTX version",
    300: "invalid source",
    301: "file not found",
    400: "invalid handle",
    500: "not found",
    600: "not ready",
    700: "illegal address",
    701: "out of launch resources",
    702: "launch timeout",
    709: "context destroyed",
    710: "device assert",
    716: "misaligned address",
    719: "launch failed",
    800: "not permitted",
    801: "not supported",
    802: "system not ready",
    803: "driver mismatch",
    **{code: words for code, (words, _) in _CAPTURES.items()},
    910: "graph update failed",
    999: "unknown error",
}
"""Results that a reader may meet, in two or three words."""
