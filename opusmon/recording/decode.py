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


def plain(n: Any, codec: Any, data: Any, itemsize: int) -> bytes | None:
    """Column bytes of a stored chunk, None when it is not exactly `n` rows of `itemsize` bytes."""
    if not isinstance(n, int) or not isinstance(data, bytes) or not 0 < n <= MAX_CHUNK_B // itemsize:
        return None
    size = n * itemsize
    if codec == ZLIB:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(data, size + 1)
        except zlib.error:
            return None
        if not stream.eof:
            return None
    elif codec != RAW:
        return None
    return data if len(data) == size else None


def decode_many(stored: Iterable[Stored], dtype: Dtype) -> dict[Any, bytes | None]:
    """Row bytes by id, see `join`; None for a damaged chunk."""
    found: dict[Any, bytes | None] = {}
    by_n: defaultdict[int, list[tuple[Any, bytes]]] = defaultdict(list)
    for chunk in stored:
        data = plain(chunk.n, chunk.codec, chunk.data, dtype.itemsize)
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


def decode_in_order(
    stored: Iterable[tuple[Any, Any, Any, Any]], dtype: Dtype, most_b: int
) -> tuple[Rows | None, list[Any]]:
    """Rows of chunks in the order of their ids, None when they are too many; and the ids of the damaged ones.

    Args:
        stored: the chunks as `Stored` has them, in any order.
        dtype: what they hold.
        most_b: most bytes of rows.
    """
    whole: dict[Any, tuple[int, bytes]] = {}
    damaged: list[Any] = []
    itemsize, left_b = dtype.itemsize, most_b
    for number, n, codec, packed in stored:
        data = plain(n, codec, packed, itemsize)
        if data is None:
            damaged.append(number)
            continue
        whole[number] = n, data
        left_b -= len(data)
        if left_b < 0:
            return None, damaged
    ids = sorted(whole)
    lengths = np.array([whole[number][0] for number in ids], np.int64)
    ends = np.cumsum(lengths)
    rows, lump = np.empty(int(lengths.sum()), dtype), f"V{dtype.itemsize}"
    for n in np.unique(lengths).tolist():
        members = np.flatnonzero(lengths == n)
        block = columns_of([whole[ids[place]][1] for place in members.tolist()], n, dtype, dtype.names or ())
        if len(members) == len(ids):
            return block.reshape(-1), damaged
        # As lumps of bytes: numpy copies rows field by field, which takes 20 times as long.
        rows.view(lump)[(ends[members] - n)[:, None] + np.arange(n)] = block.view(lump)
    return rows, damaged


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
    offsets: dict[str, int] = {}
    at = 0
    for name in dtype.names or ():
        offsets[name] = at
        at += n * dtype[name].itemsize
    stored = np.dtype(
        {
            "names": list(names),
            "formats": [(dtype[name], (n,)) for name in names],
            "offsets": [offsets[name] for name in names],
            "itemsize": at,
        }
    )
    table = np.frombuffer(b"".join(blobs), stored)
    out = np.empty((len(blobs), n), dtype=np.dtype([(name, dtype[name]) for name in names]))
    for name in names:
        out[name] = table[name]
    return out
