"""XID codes in plain language: what happened, and what to do about it."""

from __future__ import annotations

_APP = "restart the program; if it repeats on this GPU only, test the GPU"
_RESET = "drain the host and reset the GPU"
_RMA = "drain the host, run the field diagnostic, replace the GPU if it repeats"
_LINK = "see the NVLink error counts and link states; reset the GPUs if links are down"
_REBOOT = "the GPU needs a reset or the host a reboot"

MEANINGS: dict[int, tuple[str, str]] = {
    8: ("the GPU stopped processing", _APP),
    13: ("a kernel raised an exception (often an out-of-range access)", _APP),
    31: ("a kernel touched memory it may not (MMU fault)", _APP),
    32: ("invalid or damaged command stream", "restart the program; check PCIe if it repeats"),
    38: ("driver firmware error", "update the driver if it repeats"),
    43: ("a program's GPU channel was stopped", _APP),
    44: ("graphics engine fault during a context switch", _RESET),
    45: ("work was torn down after an earlier error or because its program ended", "look for an earlier XID"),
    46: ("the GPU stopped processing", _RESET),
    48: ("uncorrectable double-bit memory error", "drain the host and reset the GPU; see the remap counts"),
    54: ("auxiliary power is not connected", "check the power cables"),
    56: ("display engine error", "update the driver if it repeats"),
    57: ("memory link training error", _RMA),
    58: ("memory timing error", _RMA),
    61: ("internal microcontroller breakpoint or warning", _RESET),
    62: ("internal microcontroller halted", _REBOOT),
    63: ("a memory row was remapped or a page retired", "nothing now; reset the GPU when a remap is pending"),
    64: ("recording a row remap or retired page failed", _RMA),
    68: ("video decoder exception", _APP),
    69: ("graphics engine class error", _APP),
    74: ("NVLink error", _LINK),
    79: ("the GPU has fallen off the bus", "check power, temperature and seating; reboot the host"),
    92: ("high rate of corrected memory errors", _RMA),
    94: (
        "uncorrectable memory error, contained to one program",
        "restart that program; reset the GPU when convenient",
    ),
    95: ("uncorrectable memory error, not contained", "stop all programs on the GPU and reset it"),
    109: ("a context switch timed out", _APP),
    110: ("security fault", _REBOOT),
    119: ("the GPU system processor (GSP) did not answer in time", _REBOOT),
    120: ("the GPU system processor (GSP) failed", _REBOOT),
    121: ("error on the chip-to-chip link", "reset the GPU when convenient"),
    122: ("the GPU's SPI flash could not be read or written", _RMA),
    123: ("power management unit request failed", _RESET),
    136: ("link training between GPUs failed", _LINK),
    137: (
        "an NVLink access faulted on the other side",
        "look for an XID on the peer GPU; restart the program",
    ),
    140: ("unrecovered memory error", _RESET),
    143: ("GPU initialisation failed", _REBOOT),
    144: ("NVLink error in the SAW unit", _LINK),
    145: ("NVLink error in the RLW unit; often not fatal", _LINK),
    146: ("NVLink error in the TLW unit", _LINK),
    147: ("NVLink error in the TREX unit", _LINK),
    148: ("NVLink error in the NVLPW unit", _LINK),
    149: ("NVLink error in the link controller; fatal only with a link down", _LINK),
    150: ("NVLink error in the MSE unit", _LINK),
    154: ("the driver says which recovery the GPU needs", "do what nvidia-smi -q names as recovery action"),
    155: ("an NVLink link went down by software", _LINK),
    156: ("a resource was retired", "reset the GPU when convenient"),
    158: ("timeout in the GPU's memory fabric", _RESET),
    160: ("channel or row remapping changed", "reset the GPU when a remap is pending"),
    999: ("an error whose number the driver does not tell", "look for 'NVRM: Xid' in dmesg"),
}


def meaning(code: int) -> str:
    """One line: what the XID means and what to do."""
    what, todo = MEANINGS.get(
        code, ("not in this table", "look it up in NVIDIA's XID catalogue, and in dmesg")
    )
    return f"{what}: {todo}"
