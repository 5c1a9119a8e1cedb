"""Fields, channels, batches and interned text."""

import json

import numpy as np
import pytest

from opusmon.channels import ALL, GPU
from opusmon.schema import MAX_TEXT_CHARS, Batch, Channel, Field, SchemaError, StringTable, join_rows


def test_every_channel_survives_its_description():
    for channel in ALL:
        again = Channel.from_json(channel.to_json())
        assert again == channel
        assert again.dtype == channel.dtype
        assert channel.dtype.names[0] == "t"


def test_measured_numbers_can_say_missing():
    for channel in ALL:
        for field in channel.fields:
            integer = field.dtype[1] in "iu"
            assert (
                not integer
                or field.text
                or field.name in (*channel.key, "dt_ns", "tid", "by_tid", "stream", "pid", "number")
            ), (
                channel.name,
                field.name,
            )


def test_a_newer_description_is_read_as_far_as_it_goes():
    body = json.loads(GPU.to_json())
    body["colour"] = "green"
    body["fields"].append({"name": "flux_wb", "dtype": "<f8", "unit": "Wb", "shape": "round"})
    channel = Channel.from_json(json.dumps(body))
    assert channel.by_name["flux_wb"].unit == "Wb"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"name": "x", "kind": "gauge", "key": [], "fields": [{"name": "a", "dtype": "O"}]}',
     '{"name": "x", "kind": "gauge", "key": ["b"], "fields": []}', "[" * 100_000],
)  # fmt: skip
def test_a_hostile_description_is_one_error(text):
    with pytest.raises(SchemaError):
        Channel.from_json(text)


def test_a_batch_must_fit_its_channel():
    with pytest.raises(SchemaError):
        Batch(GPU, np.empty(1, dtype=[("t", "<i8")]))
    with pytest.raises(SchemaError):
        Batch(GPU, np.empty(0, dtype=GPU.dtype))
    with pytest.raises(SchemaError):
        Field("a", "<f2")


def test_joined_rows_keep_arrival_order_among_equals():
    channel = Channel("c", "event", (Field("n", "<i4"),))
    parts = [channel.rows([(5, 1), (7, 2)]), channel.rows([(5, 3), (6, 4)])]
    assert join_rows(parts, channel)["n"].tolist() == [1, 3, 4, 2]
    assert len(join_rows([], channel)) == 0


def test_the_string_table_is_bounded_and_says_when_it_is_full():
    table = StringTable(limit=4)
    ids = [table.intern(text) for text in ("a", "b", "c", "d", "a")]
    assert [table.text(n) for n in ids] == ["a", "b", "c", StringTable.FULL, "a"]
    assert table.text(99) == "?"
    assert len(table.text(StringTable().intern("x" * 9000))) <= MAX_TEXT_CHARS


def test_new_texts_are_found_by_count():
    table = StringTable()
    table.intern("a")
    held = len(table)
    table.intern("b")
    assert table.since(held) == [(2, "b")]
    assert table.since(len(table)) == []
