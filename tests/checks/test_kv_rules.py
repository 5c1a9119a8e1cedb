"""FlashAttention-3's rules on plain numbers, and how a cache can be viewed."""

import pytest

from opusmon.checks.kv_rules import FP8, Call, copies, paths, problems, takers, tile
from opusmon.checks.kv_tensor import (
    AXES,
    Cache,
    LayoutError,
    Strided,
    contiguous_strides,
    fits,
    read,
)

SIZES = {
    "bfloat16": 2,
    "float16": 2,
    FP8: 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "float32": 4,
    "int32": 4,
    "int64": 8,
}


def info(*shape, dtype="bfloat16", strides=None, name="k", address=0):
    return Strided(name, shape, strides or contiguous_strides(shape), dtype, SIZES[dtype], address)


def dense(b=2, s=512, h=4, d=128, dtype="bfloat16"):
    return Cache("dense", info(b, s, h, d, dtype=dtype), info(b, s, h, d, dtype=dtype, name="v"))


def paged(page=128, pages=8, h=4, d=128, dtype="bfloat16", dv=None):
    return Cache(
        "paged",
        info(pages, page, h, d, dtype=dtype),
        info(pages, page, h, dv or d, dtype=dtype, name="v"),
    )


def kinds(*words, **named):
    return [problem.kind for problem in problems(*words, **named)]


# Silent copies: what the Python wrapper does when the last stride is not 1.


def innermost_tokens(b, s, h, d, name="k"):
    """(b, s, h, d) in memory as b, h, d, s."""
    return info(b, s, h, d, strides=(h * d * s, 1, d * s, s), name=name)


def heads_innermost(b, s, h, d, name="v"):
    """(b, s, h, d) in memory as b, s, d, h: stride(-1) is h, stride(-3) is h * d."""
    return info(b, s, h, d, strides=(s * h * d, h * d, 1, h), name=name)


def test_a_k_without_contiguous_head_dim_is_copied_in_each_layers_call():
    k = innermost_tokens(2, 512, 4, 128)
    (problem,) = problems(Cache("dense", k, dense().v), Call(layers=32))
    assert problem.kind == "silent_copy"
    # 2 x 512 x 4 x 128 elements of 2 bytes are 1 MiB, 32 times: read and written.
    assert problem.facts == {
        "copied_b_per_call": 2**20,
        "calls_per_step": 32,
        "read_b_per_step": 2**25,
        "written_b_per_step": 2**25,
    }


def test_a_v_whose_tokens_are_innermost_is_refused_instead():
    # v.stride(-1) != 1 and v.stride(-3) == 1: the wrapper leaves it, and the kernel's check does not.
    v = innermost_tokens(2, 512, 4, 128, "v")
    (problem,) = problems(Cache("dense", dense().k, v), Call())
    assert (problem.kind, problem.code) == ("last_dim", "Input tensor must have contiguous last dimension")


def test_a_v_whose_heads_are_innermost_is_copied():
    (problem,) = problems(Cache("dense", dense().k, heads_innermost(2, 512, 4, 128)), Call())
    assert (problem.kind, problem.facts["copied_b_per_call"]) == ("silent_copy", 2**20)


def test_vllms_wrapper_copies_both():
    cache = Cache("dense", innermost_tokens(2, 512, 4, 128), innermost_tokens(2, 512, 4, 128, "v"))
    assert [name for name, _one in copies(cache, Call("vllm"), None)] == ["K", "V"]


def test_a_paged_cache_is_refused_by_upstream_and_copied_whole_by_vllm():
    k, v = innermost_tokens(8, 128, 4, 128), innermost_tokens(8, 128, 4, 128, "v")
    cache = Cache("paged", k, v)
    found = problems(cache, Call())
    assert [one.kind for one in found] == ["last_dim", "last_dim"]
    assert found[0].code == "k_cache must have contiguous last dimension"
    assert kinds(cache, Call("vllm")) == ["silent_copy", "silent_copy"]


def test_a_q_is_copied_too():
    q = heads_innermost(2, 1, 32, 128, "q")
    (problem,) = problems(dense(), Call(), q)
    assert (problem.kind, problem.facts["copied_b_per_call"]) == ("silent_copy", 2 * 32 * 128 * 2)


def test_other_strides_are_free():
    # (b, s, h, d) in memory as b, h, s, d.
    k = info(2, 512, 4, 128, strides=(4 * 512 * 128, 128, 512 * 128, 1))
    assert problems(Cache("dense", k, k), Call()) == []


# Dtypes and dims.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", FP8])
def test_the_three_dtypes_are_taken(dtype):
    assert problems(paged(dtype=dtype), Call()) == []


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2", "uint8"])
def test_other_dtypes_are_not(dtype):
    (problem,) = problems(paged(dtype=dtype), Call())
    assert problem.kind == "dtype"
    assert problem.code.startswith("FlashAttention only supports fp16, bf16, and fp8_e4m3")


def test_an_fp8_cache_needs_an_fp8_query():
    (problem,) = problems(dense(dtype=FP8), Call(), info(2, 1, 32, 128, name="q"))
    assert (problem.kind, problem.code) == ("dtype_mismatch", "query and key must have the same dtype")
    assert "quantise q" in problem.change


def test_k_and_v_have_one_dtype():
    cache = Cache("dense", dense(dtype=FP8).k, dense().v)
    assert kinds(cache, Call()) == ["dtype_mismatch"]


@pytest.mark.parametrize(
    ("dim", "dtype", "fine"),
    [
        (64, "bfloat16", True),
        (72, "bfloat16", True),
        (76, "bfloat16", False),
        (80, FP8, True),
        (72, FP8, False),
        (256, "bfloat16", True),
        (264, "bfloat16", False),
    ],
)
def test_head_dims(dim, dtype, fine):
    assert {one.kind for one in problems(dense(d=dim, dtype=dtype), Call())} - {"alignment"} == (
        set() if fine else {"head_dim"}
    )


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "fine"),
    [
        (192, 128, "bfloat16", True),
        (192, 96, "bfloat16", False),
        (64, 512, "bfloat16", True),
        (64, 512, FP8, False),
        (64, 520, "bfloat16", False),
        (128, 64, "bfloat16", False),
    ],
)
def test_a_v_of_another_head_dim(dim, dim_v, dtype, fine):
    found = kinds(paged(d=dim, dv=dim_v, dtype=dtype), Call())
    assert found == ([] if fine else ["head_dim"])


def test_kv_heads_divide_the_heads_of_q():
    assert kinds(dense(), Call(), info(2, 1, 30, 128, name="q")) == ["heads"]
    assert kinds(dense(), Call(q_heads=30)) == ["heads"]
    assert kinds(dense(), Call(), info(2, 1, 32, 128, name="q")) == []


def test_batch_and_head_dim_of_q_are_those_of_k():
    assert kinds(dense(b=4), Call(), info(2, 1, 32, 128, name="q")) == ["shape"]
    assert kinds(dense(), Call(), info(2, 1, 32, 64, name="q")) == ["shape"]
    assert kinds(dense(), Call(), info(32, 128, name="q")) == ["shape"]


def test_k_and_v_have_one_shape():
    assert kinds(Cache("dense", dense().k, dense(s=256).v), Call()) == ["shape"]


# Alignment.


def test_steps_are_multiples_of_16_bytes():
    # Rows of 132 bf16, of which 128 are used: heads step by 264 bytes, 8 over; tokens by 1056, sequences by 540,672.
    k = info(2, 512, 4, 128, strides=(512 * 528, 528, 132, 1))
    (problem,) = problems(Cache("dense", k, dense().v), Call())
    assert (problem.kind, problem.facts) == ("alignment", {"stride_b": 264})


def test_the_first_element_is_too():
    k = info(2, 512, 4, 128, address=4096 + 8)
    (problem,) = problems(Cache("dense", k, dense().v), Call())
    assert (problem.kind, problem.facts) == ("alignment", {"offset_b": 8})


def test_a_dimension_of_length_1_steps_nowhere():
    k = info(1, 512, 4, 128, strides=(3, 512, 128, 1))
    assert problems(Cache("dense", k, k), Call()) == []


# Page table and descales.


def test_the_page_table_is_int32():
    (problem,) = problems(paged(), Call(), table=info(2, 4, dtype="int64", name="page_table"))
    assert (problem.kind, problem.code) == ("page_table", "page_table must have dtype torch.int32")


def test_a_page_table_that_is_not_contiguous_is_copied():
    table = info(2, 4, dtype="int32", strides=(1, 2), name="page_table")
    (problem,) = problems(paged(), Call(), table=table)
    assert (problem.kind, problem.facts) == ("silent_copy", {"copied_b_per_call": 32})


def test_a_page_table_of_a_cache_that_is_not_paged():
    assert kinds(dense(), Call(), table=info(2, 4, dtype="int32")) == ["page_table"]
    assert kinds(paged(), Call(), table=info(4, dtype="int32")) == ["page_table"]


def test_batch_of_the_page_table_is_that_of_q():
    q = info(3, 1, 32, 128, name="q")
    assert kinds(paged(), Call(), q, info(2, 4, dtype="int32")) == ["page_table"]


@pytest.mark.parametrize(
    ("shape", "dtype", "fine"),
    [
        ((2, 4), "float32", True),
        ((2, 32), "float32", False),
        ((4,), "float32", False),
        ((3, 4), "float32", False),
        ((2, 4), "bfloat16", False),
    ],
)
def test_a_descale_has_a_float_for_each_sequence_and_kv_head(shape, dtype, fine):
    q = info(2, 1, 32, 128, dtype=FP8, name="q")
    found = kinds(dense(dtype=FP8), Call(), q, descales={"q": info(*shape, dtype=dtype)})
    assert found == ([] if fine else ["descale"])


def test_a_descale_without_fp8_is_only_noted():
    (problem,) = problems(dense(), Call(), descales={"k": info(2, 4, dtype="float32")})
    assert (problem.kind, problem.level) == ("descale", "note")


# Tiles and TMA. The table is written out by hand from tile_size_fwd_sm90.


@pytest.mark.parametrize(
    ("dim", "dim_v", "itemsize", "full", "causal", "local"),
    [
        (64, 64, 2, (192, 192), (192, 128), (192, 128)),
        (40, 40, 2, (192, 192), (192, 128), (192, 128)),
        (64, 256, 2, (128, 96), (128, 96), (128, 96)),
        (64, 512, 2, (64, 64), (64, 64), (64, 64)),
        (96, 96, 2, (192, 144), (192, 144), (192, 128)),
        (128, 128, 2, (128, 176), (128, 128), (128, 128)),
        (192, 128, 2, (128, 128), (128, 128), (128, 96)),
        (192, 192, 2, (128, 112), (128, 112), (128, 96)),
        (256, 256, 2, (128, 80), (128, 80), (128, 64)),
        (64, 64, 1, (192, 160), (192, 160), (192, 160)),
        (96, 96, 1, (192, 128), (192, 128), (192, 128)),
        (128, 128, 1, (128, 224), (128, 224), (128, 224)),
        (192, 192, 1, (128, 160), (128, 160), (128, 160)),
        (256, 256, 1, (128, 128), (128, 128), (128, 64)),
    ],
)
def test_tiles(dim, dim_v, itemsize, full, causal, local):
    found = tuple(tile(dim, dim_v, itemsize, mask) for mask in ("full", "causal", "local"))
    assert found == (full, causal, local)


def test_tiles_of_vllms_build_and_of_softcap():
    assert tile(64, 64, 2, "local", build="vllm") == (192, 160)
    assert tile(64, 256, 2, "full", build="vllm") == (128, 112)
    assert tile(128, 128, 2, "causal", build="vllm", one_group=True) == (64, 128)
    assert tile(64, 64, 2, "causal", build="vllm", one_group=True) == (64, 192)
    assert tile(128, 128, 1, "local", softcap=True) == (128, 192)
    assert tile(192, 192, 1, "local", softcap=True) == (128, 128)


def loads(cache, **call):
    return [(path.mask, path.tma) for path in paths(cache, Call(**call))]


@pytest.mark.parametrize(
    ("page", "seqlen_q", "expected"),
    [
        # 8 heads of q share a KV head: 17 x 8 = 136 rows are over 128, 16 x 8 = 128 are not.
        (128, 17, True),
        (128, 16, False),
        (256, 17, True),
        (64, 17, False),
        (128, 1, False),
        (128, 0, None),
        (64, 0, False),
    ],
)
def test_tma_needs_pages_of_whole_tiles_and_more_rows_than_a_tile(page, seqlen_q, expected):
    assert loads(paged(page), mask="causal", q_heads=32, seqlen_q=seqlen_q) == [("causal", expected)]


def test_without_a_mask_all_are_listed():
    assert loads(paged(128), q_heads=32, seqlen_q=512) == [("full", False), ("causal", True), ("local", True)]


def test_new_keys_and_left_padding_keep_from_tma():
    assert loads(paged(128), mask="causal", q_heads=32, seqlen_q=512, appends=True) == [("causal", False)]


def test_vllms_build_never_uses_tma_with_a_local_mask():
    assert loads(paged(128), build="vllm", mask="local", q_heads=32, seqlen_q=512) == [("local", False)]


def test_vllms_build_takes_one_warpgroup_up_to_64_query_tokens():
    # 64 tokens of 1 head: 64 rows are not over 64; of 2 heads: 128 are, where upstream wants over 128.
    assert loads(paged(128, h=4), build="vllm", mask="causal", q_heads=4, seqlen_q=64) == [("causal", False)]
    assert loads(paged(128, h=4), build="vllm", mask="causal", q_heads=8, seqlen_q=64) == [("causal", True)]
    assert loads(paged(128, h=4), mask="causal", q_heads=8, seqlen_q=64) == [("causal", False)]


def test_one_query_token_drops_the_causal_mask_but_for_head_dims_up_to_128():
    # 256 heads of q on one KV head, one token each: 256 rows. Head dim 128 keeps kBlockN 128, 64 takes 192.
    (of_128,) = paths(paged(128, h=1), Call(mask="causal", q_heads=256, seqlen_q=1))
    (of_64,) = paths(paged(128, h=1, d=64), Call(mask="causal", q_heads=256, seqlen_q=1))
    assert (of_128.block_n, of_128.tma) == (128, True)
    assert (of_64.block_n, of_64.tma) == (192, False)


def test_small_pages_are_a_problem_only_where_tma_would_be_used():
    prefill = Call(mask="causal", q_heads=32, seqlen_q=512)
    (problem,) = problems(paged(16), prefill)
    assert (problem.kind, problem.level) == ("no_tma", "problem")
    assert problem.facts == {"page_size": 16, "block_m": 128, "block_n": 128}
    assert problems(paged(128), prefill) == []
    assert problems(paged(16), Call(mask="causal", q_heads=32, seqlen_q=1)) == []
    assert problems(paged(16), Call(mask="causal")) == []
    assert {one.level for one in problems(paged(16), Call(q_heads=32, seqlen_q=512))} == {"note"}


# Layouts.


def how(cache):
    return {fit.consumer: (fit.how, fit.copied_b) for fit in fits(cache)}


def test_a_pair_of_nhd_pages():
    cache = read([info(8, 16, 4, 128), info(8, 16, 4, 128)], page_size=16)
    assert (cache.kind, cache.page_size, cache.k.order(AXES["paged"])) == (
        "paged",
        16,
        ("pages", "tokens", "heads", "dim"),
    )
    # K and V of 8 x 16 x 4 x 128 bf16 are 128 KiB each.
    assert how(cache) == {
        "FlashAttention-3 paged": ("as is", 0),
        "FlashInfer NHD": ("as is", 0),
        "FlashInfer HND": ("by view: transpose(1, 2)", 0),
        "vLLM FlashAttention": ("only by a copy", 262144),
        "vLLM FlashInfer": ("only by a copy", 262144),
        "SGLang, a layer": ("by view: flatten(0, 1)", 0),
    }


def test_a_pair_of_hnd_pages():
    cache = read([info(8, 4, 16, 128), info(8, 4, 16, 128)], "hnd")
    assert cache.k.shape == (8, 16, 4, 128)
    assert cache.k.strides == (8192, 128, 2048, 1)
    assert cache.k.order(AXES["paged"]) == ("pages", "heads", "tokens", "dim")
    found = how(cache)
    assert found["FlashAttention-3 paged"] == ("by view: transpose(1, 2)", 0)
    assert found["FlashInfer HND"] == ("as is", 0)
    # Tokens of a page lie apart: no view makes slots of them.
    assert found["SGLang, a layer"] == ("only by a copy", 262144)


def test_vllms_cache_of_flashattention():
    cache = read([info(2, 8, 16, 4, 128, name="kv")], "vllm")
    assert (cache.k.shape, cache.joined, cache.v.name) == ((8, 16, 4, 128), 0, "kv[1]")
    # V begins after 8 x 16 x 4 x 128 elements of 2 bytes.
    assert cache.v.address == 131072
    found = how(cache)
    assert found["FlashAttention-3 paged"] == ("by view: [0] and [1]", 0)
    assert found["vLLM FlashAttention"] == ("as is", 0)
    assert found["vLLM FlashInfer"] == ("by view: transpose(0, 1)", 0)
    assert found["SGLang, a layer"] == ("by view: [0] and [1], then flatten(0, 1)", 0)


def test_vllms_cache_of_flashinfer():
    cache = read([info(8, 2, 16, 4, 128, name="kv")])
    assert (cache.k.strides, cache.v.address) == ((16384, 512, 128, 1), 16384)
    found = how(cache)
    assert found["vLLM FlashInfer"] == ("as is", 0)
    # K of a block is followed by V of it: slots of K are no view.
    assert found["SGLang, a layer"][0] == "only by a copy"


def test_blocks_of_vllm_are_multiples_of_16():
    found = how(read([info(2, 8, 24, 4, 128, name="kv")]))
    assert found["vLLM FlashAttention"] == ("no: its blocks are multiples of 16 tokens", 0)


def test_sglangs_slots_become_pages_by_a_view():
    slots = info(256 + 16, 4, 128)
    cache = read([slots, slots], "sglang", page_size=16)
    assert cache.k.shape == (17, 16, 4, 128)
    assert cache.k.strides == (8192, 512, 128, 1)
    found = how(cache)
    assert found["SGLang, a layer"] == ("as is", 0)
    assert found["FlashAttention-3 paged"] == ("by view: unflatten(0, (-1, page size))", 0)
    assert read([slots, slots], "sglang").page_size == 1
    with pytest.raises(LayoutError, match="272 slots"):
        read([slots, slots], "sglang", page_size=64)


def test_flashinfer_wants_the_strides_of_k_and_v_equal():
    wide = info(8, 16, 4, 128, strides=(2 * 8192, 512, 128, 1))
    assert how(read([info(8, 16, 4, 128), wide], page_size=16))["FlashInfer NHD"][0] == "only by a copy"


def test_dense_sequences_that_follow_each_other_are_varlen_by_a_view():
    k = info(2, 512, 4, 128)
    assert how(read([k, k])) == {
        "FlashAttention-3": ("as is", 0),
        "FlashAttention-3 varlen": ("by view: flatten(0, 1)", 0),
    }
    apart = info(2, 512, 4, 128, strides=(2 * 512 * 512, 512, 128, 1))
    assert how(read([apart, apart]))["FlashAttention-3 varlen"][0] == "only by a copy"


def test_a_last_dimension_that_is_not_contiguous_is_taken_by_nobody():
    k = innermost_tokens(8, 16, 4, 128)
    assert {word for word, _b in how(Cache("paged", k, k)).values()} == {"only by a copy"}


# Who takes it: what the kernel refuses, it does not take.


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (dense(d=320), "head dim 320 is over 256"),
        (dense(d=100), "head dim 100 of K is no multiple of 8, as bfloat16 needs"),
        (dense(dtype="float32"), "K (k) is float32, which the kernel does not take"),
        (dense(dtype="float8_e5m2"), "K (k) is float8_e5m2, which the kernel does not take"),
        (
            Cache("dense", dense().k, dense(dtype=FP8).v),
            "V (v) is float8_e4m3fn and K (k) is bfloat16",
        ),
        (
            Cache("dense", info(2, 512, 4, 128, address=1032), dense().v),
            # 1032 is 64 x 16 + 8.
            "K (k) begins 8 bytes after a multiple of 16",
        ),
        (
            Cache("dense", info(2, 64, 8, 128), info(2, 64, 4, 128, name="v")),
            "K is (2, 64, 8, 128) and V is (2, 64, 4, 128): only their head dims may differ",
        ),
    ],
)
def test_a_cache_that_the_kernel_refuses_is_taken_by_none_of_its_functions(cache, why):
    assert [(fit.consumer, fit.how, fit.copied_b) for fit in takers(cache)] == [
        ("FlashAttention-3", f"no: {why}", 0),
        ("FlashAttention-3 varlen", f"no: {why}", 0),
    ]
    assert why in {problem.what for problem in problems(cache, Call())}


def test_what_one_kernel_refuses_says_nothing_of_the_engines():
    found = {fit.consumer: fit.how for fit in takers(paged(page=16, d=320))}
    assert found["FlashAttention-3 paged"] == "no: head dim 320 is over 256"
    assert found["SGLang, a layer"] == "by view: flatten(0, 1)"


def test_a_copy_that_is_needed_anyway_is_aligned():
    # Sequences lie apart, so varlen takes a copy; as they are, their heads step by 132 x 2 bytes, 8 over.
    k = info(2, 512, 4, 128, strides=(2 * 512 * 528, 528, 132, 1))
    assert [(fit.how, fit.copied_b) for fit in takers(Cache("dense", k, k))] == [
        ("no: dimension 2 of K (k) steps by 264 bytes, no multiple of 16", 0),
        ("only by a copy", 2 * 2 * 512 * 4 * 128 * 2),
    ]


# Bytes viewed as something else, as tensor.view(dtype) does it.


def test_bytes_viewed_as_two_are_half_as_many():
    k = info(32, 16, 8, 128, dtype="uint8", address=64)
    # Contiguous bytes step by 16384, 1024, 128, 1.
    viewed = k.view_as("float16", 2)
    assert (viewed.shape, viewed.strides) == ((32, 16, 8, 64), (8192, 512, 64, 1))
    assert (viewed.dtype, viewed.itemsize, viewed.address) == ("float16", 2, 64)
    assert viewed.size_b == k.size_b == 32 * 16 * 8 * 128


def test_bytes_viewed_as_one_are_as_many_whatever_their_strides():
    k = info(2, 8, 4, 16, dtype="uint8", strides=(512, 1, 128, 8))
    viewed = k.view_as(FP8, 1)
    assert (viewed.shape, viewed.strides, viewed.dtype) == (k.shape, k.strides, FP8)


@pytest.mark.parametrize(
    ("k", "why"),
    [
        (info(2, 8, 4, 127, dtype="uint8"), "last dimension is no multiple of 2"),
        (info(dtype="uint8"), "last dimension is no multiple of 2"),
        (info(2, 8, 4, 16, dtype="uint8", strides=(512, 1, 128, 8)), "last stride is not 1"),
        (info(2, 8, 4, 16, dtype="uint8", strides=(544, 68, 17, 1)), "begin at a multiple of 2 bytes"),
        (info(2, 8, 4, 16, dtype="uint8", address=3), "begin at a multiple of 2 bytes"),
    ],
)
def test_bytes_that_cannot_be_viewed_so_are_an_error(k, why):
    with pytest.raises(LayoutError, match=why):
        k.view_as("float16", 2)


@pytest.mark.parametrize(
    ("shape", "page_size", "table", "kind"),
    [
        ((2, 512, 4, 128), 0, False, "dense"),
        ((8, 16, 4, 128), 0, True, "paged"),
        ((8, 4, 16, 128), 16, False, "paged"),
        ((4096, 4, 128), 0, False, "varlen"),
        ((4096, 4, 128), 16, False, "paged"),
    ],
)
def test_auto(shape, page_size, table, kind):
    cache = read([info(*shape), info(*shape)], page_size=page_size, table=table)
    assert cache.kind == kind
    assert page_size in (0, cache.page_size)


@pytest.mark.parametrize(
    ("tensors", "layout", "page_size", "why"),
    [
        ([info(8, 16, 16, 128)] * 2, "auto", 16, "may be NHD or HND"),
        ([info(8, 16, 4, 128)] * 2, "auto", 32, "has no pages of 32"),
        ([info(8, 16, 4, 128)] * 2, "nhd", 32, "--page-size is 32"),
        ([info(2, 2, 16, 4, 128)], "vllm", 0, "may both hold"),
        ([info(3, 8, 16, 4, 128)], "vllm", 0, "no dimension of length 2"),
        ([info(8, 128)], "auto", 0, "have 4 or 5 dimensions"),
        ([info(8, 128)] * 2, "auto", 0, "have 3 dimensions"),
        ([info(8, 16, 4, 128), info(128, 4, 128)], "auto", 0, "K has 4 dimensions and V 3"),
        ([info(8, 16, 4, 128)] * 2, "varlen", 0, "varlen needs 3 dimensions"),
    ],
)
def test_what_fits_no_layout_or_two_is_said(tensors, layout, page_size, why):
    with pytest.raises(LayoutError, match=why):
        read(tensors, layout, page_size=page_size)
