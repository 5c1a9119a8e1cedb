"""Salvage of files made to hurt: little memory, little time, and nothing but a `RecordingError`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from recording.samples import POWER, damage, edit, fault, measured, power, refused, ticks, write
from sessions import h200x2

from opusmon.recording import Recording, salvage, store
from opusmon.recording.pages import Pages, cell_at, values


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path / "a.opusmon", [*ticks(60), [fault(3)]])
    return tmp_path / "a.opusmon"


def test_random_damage_of_the_demo_is_salvaged(tmp_path: Path) -> None:
    data = h200x2().read_bytes()
    for seed in range(0, 150, 10):
        (tmp_path / "damaged").write_bytes(damage(data, seed))
        assert refused(lambda seed=seed: salvage(tmp_path / "damaged", tmp_path / f"out{seed}")) in (0, 1)


def varint(value: int) -> bytes:
    """SQLite's variable-length integer."""
    out = [value & 0x7F]
    while value := value >> 7:
        out.insert(0, 0x80 | (value & 0x7F))
    return bytes(out)


def leaf(cells: list[bytes]) -> bytes:
    """A table's leaf page."""
    page = bytearray(store.PAGE_B)
    page[0] = 0x0D
    end = store.PAGE_B
    for place, cell in enumerate(cells):
        end -= len(cell)
        page[end : end + len(cell)] = cell
        page[8 + 2 * place : 10 + 2 * place] = end.to_bytes(2, "big")
    page[3:5] = len(cells).to_bytes(2, "big")
    page[5:7] = end.to_bytes(2, "big")
    return bytes(page)


def long_mark(rowid: int, chars: int, overflow: int) -> bytes:
    """The cell of a mark whose text is said to go on at a page."""
    types = b"".join(map(varint, (0, 6, 6, 13 + 2 * 4, 13 + 2 * chars)))
    record = varint(len(types) + 1) + types + bytes(16) + b"kind"
    size_b = len(record) + chars
    least = (store.PAGE_B - 12) * 32 // 255 - 23
    local = least + (size_b - least) % (store.PAGE_B - 4)
    local = local if local <= store.PAGE_B - 35 else least
    head = varint(size_b) + varint(rowid)
    return head + record.ljust(local, b"x")[:local] + overflow.to_bytes(4, "big")


def add_pages(path: Path, *pages: bytes) -> None:
    data = bytearray(path.read_bytes() + b"".join(pages))
    data[28:32] = (len(data) // store.PAGE_B).to_bytes(4, "big")
    path.write_bytes(data)


@pytest.mark.parametrize("chars", [60_000, 60_000_000])
def test_overflow_pages_in_a_circle_are_not_followed(tmp_path: Path, whole: Path, chars: int) -> None:
    pages = whole.stat().st_size // store.PAGE_B
    loop = (pages + 1).to_bytes(4, "big") + b"y" * (store.PAGE_B - 4)
    add_pages(whole, loop, *(leaf([long_mark(number, chars, pages + 1)]) for number in range(100, 160)))
    code = f"print(salvage(Path({str(whole)!r}), Path({str(tmp_path / 'out')!r})))"
    assert measured(code) < 200
    with Recording.open(tmp_path / "out") as recording:
        assert recording.marks() == []


def test_long_rows_of_small_tables_are_cut_or_left(tmp_path: Path, whole: Path) -> None:
    edit(
        whole,
        f"INSERT INTO mark VALUES(1, 1, 2, 'kept', '{'x' * 60_000}')",
        f"INSERT INTO mark VALUES(2, 1, 2, 'left', '{'x' * 70_000}')",
        f"INSERT INTO session VALUES('kept', '{'y' * 60_000}'), ('left', '{'y' * 70_000}')",
    )
    salvage(whole, tmp_path / "out")
    with sqlite3.connect(tmp_path / "out") as raw:
        assert raw.execute("SELECT kind, length(text) FROM mark").fetchall() == [("kept", 8192)]
        found = raw.execute("SELECT key, length(value) FROM session WHERE key IN ('kept', 'left')").fetchall()
    assert found == [("kept", 8192)]


def test_a_row_without_a_body_is_left(whole: Path) -> None:
    pages = Pages(whole)
    try:
        for size_b in (0, 1):
            # The size says that there is nothing of the header that the page goes on with.
            page = bytes([size_b, 1, 0x81, 0x01]) + bytes(200)
            cell = cell_at(page, 1, 0)
            assert cell is not None
            pages.get = lambda number, page=page: page  # type: ignore[method-assign]
            assert values(pages, cell) is None
    finally:
        pages.close()


def test_a_wal_that_names_the_last_page_there_can_be(tmp_path: Path, whole: Path) -> None:
    salt = b"12345678"
    head = b"".join(n.to_bytes(4, "big") for n in (0x377F0682, 3_007_000, 4096, 0)) + salt + bytes(8)
    last = (2**31 - 1).to_bytes(4, "big")
    store.wal_path(whole).write_bytes(head + last + last + salt + bytes(8) + bytes(4096))
    seen: list[tuple[int, int]] = []
    report = salvage(whole, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert report.rows == 121
    assert seen[-1][1] < 100
    pages = Pages(whole)
    assert list(pages.numbers())[-2:] == [whole.stat().st_size // 4096, 2**31 - 1]
    pages.close()


def test_times_at_the_ends_of_what_an_integer_holds_are_salvaged(tmp_path: Path) -> None:
    write(tmp_path / "a", [[power((1, 0, 1.0))]])
    rows = POWER.rows([(-(2**63), 0, 1.0), (2**63 - 1, 0, 2.0)])
    data = b"".join(np.ascontiguousarray(rows[name]).tobytes() for name in rows.dtype.names or ())
    with sqlite3.connect(tmp_path / "a") as raw:
        raw.execute("INSERT INTO chunk VALUES(2, 1, '', ?, ?, 2, 0, ?)", (-(2**63), 2**63 - 1, data))
    raw.close()
    assert salvage(tmp_path / "a", tmp_path / "out").rows == 3
    with Recording.open(tmp_path / "out") as recording:
        assert recording.counts() == {"power": 3}


def test_a_report_is_a_sentence(tmp_path: Path, whole: Path) -> None:
    edit(whole, "UPDATE chunk SET data=x'00' WHERE id=1")
    assert str(salvage(whole, tmp_path / "out")) == (
        "saved 60 chunks, 119 rows of 2 channels (fault, power), 1 damaged chunk left out"
    )
