"""Frames over a pipe: what goes in comes out, and nothing hostile gets through."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.channels import GPU_EVENT, NVLINK, STATUS
from opusmon.schema import Batch, StringTable
from opusmon.wire import BATCH, CHANNEL, MAX_FRAME_B, Decoder, Encoder, WireError


def events(strings, *rows):
    return Batch(
        GPU_EVENT,
        GPU_EVENT.rows(
            [(t, 0, -1, strings.intern(kind), code, strings.intern(text)) for t, kind, code, text in rows]
        ),
    )


@given(st.booleans(), st.integers(1, 40))
def test_rows_arrive_as_sent_in_any_pieces(compress, piece):
    sender, receiver = StringTable(), StringTable()
    receiver.intern("another text first, so that ids differ")
    encoder, decoder = Encoder(sender, compress=compress), Decoder(receiver)
    links = Batch(
        NVLINK,
        NVLINK.rows([(5, 0, 3, 9, 1.5, float("nan"), 1, 2, 3, 4, 5), (6, 1, 2, 9, 0, 0, 0, 0, 0, 0, 0)]),
    )
    sent = encoder.hello("host-a") + encoder.batch(links)
    sent += encoder.batch(events(sender, (7, "xid", 79, "GPU has fallen off the bus"), (7, "xid", 79, "")))
    got = [batch for at in range(0, len(sent), piece) for batch in decoder.feed(sent[at : at + piece])]
    assert decoder.host == "host-a"
    assert got[0].channel == NVLINK
    assert got[0].rows.tobytes() == links.rows.tobytes()
    assert [receiver.text(row["kind"]) for row in got[1].rows] == ["xid", "xid"]
    assert [receiver.text(row["detail"]) for row in got[1].rows] == ["GPU has fallen off the bus", ""]
    assert got[1].rows["code"].tolist() == [79, 79]


def test_texts_and_channels_are_sent_once():
    strings = StringTable()
    encoder = Encoder(strings)
    first = encoder.batch(events(strings, (1, "xid", 13, "a long explanation " * 20)))
    second = encoder.batch(events(strings, (2, "xid", 13, "a long explanation " * 20)))
    assert len(second) == 5 + 7 + GPU_EVENT.dtype.itemsize
    assert len(first) > 400


def test_what_a_sender_refuses_is_said_with_its_remedy():
    decoder = Decoder(StringTable())
    decoder.feed(Encoder(StringTable()).unavailable("no driver", "install it"))
    assert decoder.unavailable == ("no driver", "install it")


def test_frames_of_a_newer_sender_are_skipped():
    strings = StringTable()
    unknown = struct.pack("<IB", 3, 200) + b"abc"
    decoder = Decoder(strings)
    sent = Encoder(strings).batch(Batch(STATUS, STATUS.rows([(1, *[0] * 7)])))
    assert len(decoder.feed(unknown + sent)) == 1


def test_an_unknown_text_id_reads_as_no_text():
    decoder = Decoder(StringTable())
    strings = StringTable()
    encoder = Encoder(strings)
    batches = decoder.feed(encoder.batch(Batch(STATUS, STATUS.rows([(1, 4_000_000_000, *[0] * 6)]))))
    assert batches[0].rows["collector"].tolist() == [0]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IB", MAX_FRAME_B + 1, BATCH),
        struct.pack("<IB", 2, BATCH) + b"\x00\x00",
        struct.pack("<IB", 7, BATCH) + struct.pack("<HIB", 9, 1, 0),
        struct.pack("<IB", 6, CHANNEL) + struct.pack("<H", 1) + b"nope",
        struct.pack("<IB", 2, CHANNEL) + struct.pack("<H", 60_000),
    ],
)
def test_damage_is_one_error(data):
    with pytest.raises(WireError):
        Decoder(StringTable()).feed(data)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_fuzz_never_raises_anything_else(noise, at):
    strings = StringTable()
    encoder = Encoder(strings, compress=True)
    good = bytearray(encoder.hello("h") + encoder.batch(events(strings, (1, "xid", 1, "text"))))
    good[at % len(good) : at % len(good) + len(noise)] = noise
    decoder = Decoder(StringTable())
    try:
        for batch in decoder.feed(bytes(good)):
            assert batch.rows.dtype == batch.channel.dtype
            assert np.isfinite(batch.t0)
    except WireError:
        pass
