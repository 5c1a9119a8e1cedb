"""Turning stored bytes back into rows, many chunks at a time; nothing stored is believed.

A minute of a 1 Hz channel is 60 chunks of a few rows: decoding them one by one costs two numpy calls per
column and chunk, decoding them as a block two per column.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from opusmon.codec import MAX_CHUNK_B, RAW, ZLIB
from opusmon.schema import Rows

Dtype = np.dtype[np.void]


class Stored(NamedTuple):
    """A chunk or rollup as the file holds it; any value may be of any type."""

    id: Any
    n: Any
    codec: Any
    data: Any


def plain(stored: Stored, itemsize: int) -> bytes | None:
    """Column bytes of a stored chunk, None when it is not exactly `n` rows of `itemsize` bytes."""
    n, data = stored.n, stored.data
    if not isinstance(n, int) or not isinstance(data, bytes) or not 0 < n <= MAX_CHUNK_B // itemsize:
        return None
    size = n * itemsize
    if stored.codec == ZLIB:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(data, size + 1)
        except zlib.error:
            return None
        if not stream.eof:
            return None
    elif stored.codec != RAW:
        return None
    return data if len(data) == size else None


def decode_many(stored: Iterable[Stored], dtype: Dtype) -> dict[Any, bytes | None]:
    """Row bytes by id, see `join`; None for a damaged chunk."""
    found: dict[Any, bytes | None] = {}
    by_n: defaultdict[int, list[tuple[Any, bytes]]] = defaultdict(list)
    for chunk in stored:
        data = plain(chunk, dtype.itemsize)
        if data is None:
            found[chunk.id] = None
        else:
            by_n[chunk.n].append((chunk.id, data))
    for n, members in by_n.items():
        block = columns_of([data for _, data in members], n, dtype, dtype.names or ()).tobytes()
        width = n * dtype.itemsize
        for place, (number, _) in enumerate(members):
            found[number] = block[place * width : (place + 1) * width]
    return found


def join(parts: Iterable[bytes], dtype: Dtype) -> Rows:
    """Row bytes one after another as an array of its own."""
    return np.frombuffer(bytearray().join(parts), dtype)


def columns_of(blobs: Sequence[bytes], n: int, dtype: Dtype, names: Sequence[str]) -> np.ndarray[Any, Dtype]:
    """Some columns of equally long chunks.

    Args:
        blobs: column bytes, each of `n` rows.
        n: rows per chunk.
        dtype: what the chunks hold.
        names: columns wanted.

    Returns:
        Structured array of those columns, shape (chunks, n).
    """
    table = np.frombuffer(b"".join(blobs), np.uint8).reshape(len(blobs), n * dtype.itemsize)
    out = np.empty((len(blobs), n), dtype=np.dtype([(name, dtype[name]) for name in names]))
    offset = 0
    for name in dtype.names or ():
        column = dtype[name]
        width = n * column.itemsize
        if name in names:
            out[name] = np.ascontiguousarray(table[:, offset : offset + width]).view(column)
        offset += width
    return out
