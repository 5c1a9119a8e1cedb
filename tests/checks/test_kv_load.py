"""Tensors from dumps, hostile ones too, and from what a callable returns."""

import json
import struct
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.checks.kv_load import DTYPES, choose, from_file, header
from opusmon.checks.kv_tensor import Strided
from opusmon.checks.target import TargetError

TARGETS = Path(__file__).parent / "targets"


def safetensors(path, entries, data_b=0):
    """A file of the format, written by hand."""
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_b))
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_safetensors_file(tmp_path):
    path = safetensors(
        tmp_path / "kv.safetensors",
        {
            "__metadata__": {"format": "pt"},
            "layers.0.k": entry("BF16", [2, 3, 4, 8], 0, 384),
            "layers.0.v": entry("F8_E4M3", [2, 3, 4, 8], 384, 576),
        },
        576,
    )
    assert from_file(path) == {
        "layers.0.k": Strided("layers.0.k", (2, 3, 4, 8), (96, 32, 8, 1), "bfloat16", 2),
        "layers.0.v": Strided("layers.0.v", (2, 3, 4, 8), (96, 32, 8, 1), "float8_e4m3fn", 1),
    }


def test_what_the_formats_own_library_writes_is_read(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    path = tmp_path / "kv.safetensors"
    numpy.save_file({"k": np.zeros((2, 3), np.float16), "v": np.zeros(5, np.int32)}, path)
    found = from_file(path)
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        "k": ((2, 3), "float16"),
        "v": ((5,), "int32"),
    }


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"k": entry("BF16", [4], 0, 4)}, "does not lie within"),
        ({"k": entry("BF16", [8], 0, 16)}, "does not lie within"),
        ({"k": entry("BF16", [-4], 0, 8)}, "no shape and place"),
        ({"k": entry("BF16", [True], 0, 2)}, "no shape and place"),
        ({"k": entry("BF16", [1] * 17, 0, 2)}, "no shape and place"),
        ({"k": entry("BF16", [4], 8, 0)}, "does not lie within"),
        ({"k": entry("Q4", [4], 0, 8)}, "dtype Q4, which is not known"),
        ({"k": {"dtype": "BF16"}}, "no shape and place"),
        ({"k": 3}, "no shape and place"),
        ([], "no list of tensors"),
        ({}, "holds no tensors"),
    ],
)
def test_what_cannot_be_there_is_refused(tmp_path, entries, why):
    with pytest.raises(TargetError, match=why):
        from_file(safetensors(tmp_path / "kv.safetensors", entries, 8))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02\0\0",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 4000) + b"[" * 4000,
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        struct.pack("<Q", 15) + b'{"k":1,"k":{ }}',
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, data):
    path = tmp_path / "kv.safetensors"
    path.write_bytes(data)
    with pytest.raises(TargetError):
        from_file(path)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(TargetError, match="No such file"):
        from_file(tmp_path / "none.safetensors")
    pytest.importorskip("torch")
    with pytest.raises(TargetError, match="No such file"):
        from_file(tmp_path / "none.pt")


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(list(DTYPES)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["k", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(_json | st.dictionaries(st.text(max_size=4), st.fixed_dictionaries({
    "dtype": st.sampled_from(list(DTYPES)) | _json,
    "shape": st.lists(st.integers(-2, 2**65), max_size=5) | _json,
    "data_offsets": st.lists(st.integers(-2, 2**65), max_size=3) | _json,
})), st.integers(0, 2**40))  # fmt: skip
def test_no_header_does_more_than_be_refused(document, data_b):
    try:
        found = header(json.dumps(document).encode(), data_b)
    except TargetError:
        return
    assert all(one.size_b <= data_b for one in found.values())


@given(st.binary(max_size=200))
def test_nor_do_any_bytes(data):
    try:
        header(data, 100)
    except TargetError:
        return


def test_the_size_of_a_tensor_is_exact_however_large():
    with pytest.raises(TargetError, match="does not lie"):
        header(json.dumps({"k": entry("U8", [2**62, 4], 0, 0)}).encode(), 8)


# torch's files


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_a_torch_file_keeps_strides_and_offsets(torch, tmp_path):
    k = torch.zeros(2, 4, 64, 16, dtype=torch.bfloat16).transpose(1, 2)[:, 1:]
    torch.save({"cache": [{"k": k}, 3, "text"], "v": torch.zeros(3)}, tmp_path / "kv.pt")
    found = from_file(tmp_path / "kv.pt")
    # One token of 16 bf16 was cut off: 32 bytes.
    assert found["cache.0.k"] == Strided(
        "cache.0.k", (2, 63, 4, 16), (4096, 16, 1024, 1), "bfloat16", 2, 32, "cpu"
    )
    assert set(found) == {"cache.0.k", "v"}


def test_a_torch_file_of_before_zip_is_read(torch, tmp_path):
    torch.save((torch.zeros(2), torch.zeros(3)), tmp_path / "kv.pt", _use_new_zipfile_serialization=False)
    assert [one.name for one in from_file(tmp_path / "kv.pt").values()] == ["k", "v"]


class Bad:
    def __reduce__(self):
        return (print, ("it ran",))


def test_a_file_with_code_is_refused_and_its_code_does_not_run(torch, tmp_path, capfd):
    torch.save({"k": Bad()}, tmp_path / "kv.pt")
    with pytest.raises(TargetError, match="holds more than tensors, or is none"):
        from_file(tmp_path / "kv.pt")
    assert "it ran" not in capfd.readouterr().out


def test_a_file_that_would_grow_when_unpacked_is_refused(torch, tmp_path):
    torch.save({"k": torch.zeros(100_000)}, tmp_path / "kv.pt")
    with (
        zipfile.ZipFile(tmp_path / "kv.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert (tmp_path / "packed.pt").stat().st_size < 10_000
    with pytest.raises(TargetError, match="is compressed"):
        from_file(tmp_path / "packed.pt")


def test_a_name_too_long_to_show_is_refused(torch, tmp_path):
    name = "k" * 501
    torch.save({name: torch.zeros(1)}, tmp_path / "kv.pt")
    for path in (
        tmp_path / "kv.pt",
        safetensors(tmp_path / "kv.safetensors", {name: entry("U8", [1], 0, 1)}, 1),
    ):
        with pytest.raises(TargetError, match="name of 501 characters") as caught:
            from_file(path)
        assert len(str(caught.value)) < 120


def test_a_key_that_is_a_tensor_is_not_shown(torch):
    from opusmon.checks.kv_load import of_values

    assert list(of_values({"a": {torch.tensor(31337): torch.zeros(1), 2: torch.zeros(1)}})) == [
        "a.Tensor",
        "a.2",
    ]


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + b"\0" * 40, b"text", b"\x80\x02."])
def test_what_is_no_torch_file_is_refused(torch, tmp_path, data):
    path = tmp_path / "kv.pt"
    path.write_bytes(data)
    with pytest.raises(TargetError, match="cannot be loaded"):
        from_file(path)


def test_a_sparse_tensor_has_no_strides(torch):
    from opusmon.checks.kv_load import of_values

    with pytest.raises(TargetError, match="has no strides"):
        of_values({"k": torch.zeros(2, 2).to_sparse()})


def test_a_tuple_is_named_by_position_and_layers_are_not(torch):
    from opusmon.checks.kv_load import of_values

    one = torch.zeros(1)
    assert list(of_values((one, one))) == ["k", "v"]
    assert list(of_values((one, one, None, one))) == ["k", "v", "page_table"]
    assert list(of_values([(one, one), (one, one)])) == ["0.0", "0.1", "1.0", "1.1"]
    assert list(of_values(one)) == ["kv"]


def test_the_line_that_gave_the_strides_is_known(torch):
    from opusmon.checks.kv_load import from_target
    from opusmon.checks.target import load

    found = from_target(load(f"{TARGETS}/kv.py:silent_copy"))
    lines = (TARGETS / "kv.py").read_text().splitlines()
    where = found["k"].where
    assert lines[int(where.rpartition(":")[2]) - 1].endswith("# planted: silent_copy")
    assert found["k"].line == "k = k.permute(0, 3, 1, 2)  # planted: silent_copy"
    sys.modules.pop("kv", None)


# Names


def named(*names):
    return {name: Strided(name, (1,), (1,), "bfloat16", 2) for name in names}


def test_usual_names_are_found():
    assert choose(named("key_cache", "x"), "k").name == "key_cache"
    assert choose(named("layers.3.k_cache", "x"), "k").name == "layers.3.k_cache"
    assert choose(named("K", "layers.3.k"), "k").name == "K"
    assert choose(named("x"), "k") is None


def test_several_that_fit_are_listed():
    with pytest.raises(TargetError, match=r"2 tensors may be k: say --k; there is 0\.k, 1\.k"):
        choose(named("0.k", "1.k"), "k")
    assert choose(named("0.k", "1.k"), "k", "1.k").name == "1.k"


def test_a_name_that_is_not_there_lists_those_that_are():
    with pytest.raises(
        TargetError, match="no tensor z; there is " + ", ".join(f"t{n}" for n in range(12)) + " and 8"
    ):
        choose(named(*(f"t{n}" for n in range(20))), "k", "z")


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_file_that_torch_has_not_written_is_told_in_words(tmp_path, content):
    pytest.importorskip("torch")
    path = tmp_path / "dump.pt"
    path.write_bytes(content)
    with pytest.raises(TargetError, match="cut short, or not what torch"):
        from_file(path)
