"""The incremental parser of server-sent events: the standard's rules, and any cutting into chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.collectors.api.sse import Event, Parser


def parse(*chunks, limit_b=1 << 20):
    parser = Parser(limit_b)
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()


@pytest.mark.parametrize("eol", [b"\n", b"\r\n", b"\r"])
def test_line_ends(eol):
    wire = eol.join([b"event: a", b"data: 1", b"", b"data: 2", b"data: 3", b"", b""])
    assert parse(wire) == [Event(b"1", "a"), Event(b"2\n3")]


def test_mixed_line_ends_as_proxies_make_them():
    assert parse(b"data: 1\n\r\ndata: 2\r\n\ndata: 3\r\r") == [Event(b"1"), Event(b"2"), Event(b"3")]


def test_an_event_that_ends_with_cr_is_not_held_back_for_the_lf():
    parser = Parser()
    assert parser.feed(b"data: 1\r\n\r") == [Event(b"1")]
    assert parser.feed(b"\ndata: 2\n\n") == [Event(b"2")]


def test_an_empty_line_after_a_cr_is_one():
    # CR | LF LF: the first LF belongs to the CR, the second is the blank line.
    parser = Parser()
    assert parser.feed(b"data: 1\r") == []
    assert parser.feed(b"\n\n") == [Event(b"1")]


def test_comments_pings_of_llamacpp_and_other_fields_are_no_events():
    assert parse(b":\n\n: keep-alive\n\nid: 7\nretry: 10\n\nevent: lonely\n\ndata: 1\n\n") == [Event(b"1")]


def test_a_comment_that_was_sent_as_data_is_an_event_with_odd_data():
    assert parse(b"data: : OPENROUTER PROCESSING\n\n") == [Event(b": OPENROUTER PROCESSING")]


def test_values():
    assert parse(b"data:1\ndata:  2\ndata\ndata:\n\n") == [Event(b"1\n 2\n\n")]


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2, 3), (4,)])
def test_a_byte_order_mark_is_skipped_once(cuts):
    wire = b"\xef\xbb\xbfdata: 1\n\ndata: \xef\xbb\xbf\n\n"
    edges = (0, *cuts, len(wire))
    pieces = [wire[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(*pieces) == [Event(b"1"), Event(b"\xef\xbb\xbf")]


def test_unicode_line_separators_do_not_end_lines():
    data = "a\u2028b\u2029c\x85d\x0be".encode()
    assert parse(b"data: " + data + b"\n\n") == [Event(data)]


def test_the_end_gives_what_lacks_its_blank_line():
    parser = Parser()
    assert parser.feed(b"data: 1\ndata: 2") == []
    assert parser.finish() == [Event(b"1\n2")]
    assert parser.finish() == []


@pytest.mark.parametrize("wire", [b"data: " + b"x" * 5000 + b"\n\n", b"data: xxxxxxxx\n" * 700 + b"\n"])
def test_too_much_data_is_dropped_and_said(wire):
    assert parse(wire, b"data: 1\n\n", limit_b=1000) == [Event(b"", cut=True), Event(b"1")]


def test_memory_is_bounded_whatever_comes():
    parser = Parser(1000)
    for _ in range(1000):
        parser.feed(b"x" * 1000)
        parser.feed(b"data: y\n" * 100)
    assert len(parser._line) < 2000
    assert sum(map(len, parser._data)) < 2000


def test_data_of_exactly_the_limit_is_kept():
    assert parse(b"data: " + b"x" * 1000 + b"\n\n", limit_b=1000) == [Event(b"x" * 1000)]
    assert parse(b"data: " + b"x" * 1001 + b"\n\n", limit_b=1000) == [Event(b"", cut=True)]


LINES = st.sampled_from(
    [
        b"data: 1",
        b"data:",
        b"data",
        b"data: \xc3\xa9\xe2\x80\xa8",
        b"event: x",
        b": c",
        b"",
        b"\xef\xbb\xbfdata: 2",
        b"data: " + b"y" * 40,
        b"\xff\x00",
    ]
)
WIRES = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=30).map(
    lambda parts: b"".join(line + eol for line, eol in parts)
)


@given(WIRES, st.lists(st.integers(0, 400)), st.sampled_from([30, 1 << 20]))
def test_any_cutting_gives_the_same_events(wire, cuts, limit_b):
    edges = [0, *sorted(cut for cut in cuts if cut < len(wire)), len(wire)]
    pieces = [wire[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(*pieces, limit_b=limit_b) == parse(wire, limit_b=limit_b)
    assert parse(*(wire[n : n + 1] for n in range(len(wire))), limit_b=limit_b) == parse(
        wire, limit_b=limit_b
    )


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_any_bytes_do_no_harm(chunks):
    parse(*chunks, limit_b=50)


def standard(wire):
    """The standard's algorithm on a whole stream, written from its text."""
    text = wire.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    data, events = None, []
    for line in text.split(b"\n"):
        if not line:
            if data is not None:
                events.append(data.removesuffix(b"\n"))
            data = None
        elif line.split(b":")[0] == b"data":
            value = line[5:]
            data = (data or b"") + value.removeprefix(b" ") + b"\n"
    return events


@given(WIRES)
def test_the_standards_own_algorithm_agrees(wire):
    assert [event.data for event in parse(wire + b"\n\n")] == standard(wire + b"\n\n")
