"""What compiling and loading of kernels is called: the same in stalls seen from outside and in checks of one's own code."""

from __future__ import annotations

JIT, MODULE = "jit", "module"
"""Kinds of channel `stall`."""

WORDS: dict[str, str] = {
    JIT: "JIT compilation",
    MODULE: "module or library loading",
}
"""The kinds in full."""

COMPILERS = (
    "ptxas",
    "ptxas-blackwell",
    "nvlink",
    "cicc",
    "nvcc",
    "fatbinary",
    "cudafe++",
    "tileiras",
    "clang",
    "clang++",
    "gcc",
    "g++",
    "cc",
    "c++",
)
"""Programs that a serving process runs when it compiles kernels or their launchers. At most 16."""

WARM_UP = "warm up with that shape, and keep the compiler's cache across restarts"
"""What helps against compiling while serving."""
