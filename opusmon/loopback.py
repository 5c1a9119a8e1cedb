"""Which hosts are this one. Keys go in the clear to no other, and nobody else is answered."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """A loopback address, or `localhost`; of any other name a resolver might ask the network.

    Args:
        host: lower case, IPv6 without brackets.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_loopback(host: str) -> bool:
    """As `is_loopback`, or a name below `localhost` (RFC 6761), in any case, with or without the last dot.

    This is for names that others give us, as in `Host`: none of them leads a browser to another machine.
    """
    name = host.lower().removesuffix(".")
    return name.endswith(".localhost") or is_loopback(name)
