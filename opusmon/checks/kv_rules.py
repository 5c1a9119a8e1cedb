"""What FlashAttention-3 does with q, K and V of given shapes, strides and dtypes.

Read in Dao-AILab/flash-attention, hopper/ (flash_api_stable.cpp 01d6dd1, flash_api.cpp 0e79d71,
flash_attn_interface.py 01afd16, tile_size.h 8a80215) and, where it differs, in vLLM's copy of it:
vllm-project/flash-attention (hopper/flash_api.cpp 01ed8aa, tile_size.h 02d073b) and vllm-project/vllm
(vllm/vllm_flash_attn/flash_attn_interface.py 01420e0). Alignment of 16 bytes: CUDA driver API,
cuTensorMapEncodeTiled; PTX ISA, cp.async.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from opusmon.checks.kv_tensor import FA3, Cache, Fit, Strided, fits, shape_of
from opusmon.checks.result import Level, Problem, Value

FP8 = "float8_e4m3fn"
HALF = ("float16", "bfloat16")
MAX_HEAD_DIM = 256
ALIGN_B = 16
"""What every stride but the last, and the first address, must be a multiple of."""

BUILDS = ("upstream", "vllm")
MASKS = ("full", "causal", "local")
_ROUNDED = (64, 96, 128, 192, 256, 512)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the kernel, as far as it is known.

    Attributes:
        build: whose FlashAttention-3.
        mask: one of `MASKS`; None when unknown.
        q_heads: heads of q; 0 when unknown.
        seqlen_q: query tokens of a sequence; 0 when unknown.
        softcap: scores are capped.
        appends: new K and V are written by the kernel, or sequences are padded on the left.
        layers: calls of a step.
    """

    build: str = "upstream"
    mask: str | None = None
    q_heads: int = 0
    seqlen_q: int = 0
    softcap: bool = False
    appends: bool = False
    layers: int = 1


@dataclass(frozen=True, slots=True)
class Path:
    """How the paged kernel reads K and V under one mask.

    Attributes:
        mask: one of `MASKS`.
        block_m: query rows of a tile, heads that share a KV head counted.
        block_n: key rows of a tile.
        tma: it uses TMA; None when that depends on what is unknown.
        why: the condition that decides.
    """

    mask: str
    block_m: int
    block_n: int
    tma: bool | None
    why: str


def tile(
    dim: int,
    dim_v: int,
    itemsize: int,
    mask: str,
    *,
    build: str = "upstream",
    one_group: bool = False,
    softcap: bool = False,
) -> tuple[int, int]:
    """Query and key rows of a tile on Hopper (kBlockM, kBlockN), as the choice of TMA takes them.

    That is `tile_size_fwd_sm90` with `paged_kv_non_TMA` false. Some commits of vLLM's build have an FP8 tile of 64x96
    for one warpgroup, which this leaves out: no page of 2^n tokens is a multiple of it, nor of the 224 instead.

    Args:
        dim: head dimension of q and K.
        dim_v: of V.
        itemsize: 2, or 1 for FP8.
        mask: one of `MASKS`.
        build: one of `BUILDS`.
        one_group: vLLM's build computes with one warpgroup (use_one_mma_wg).
        softcap: scores are capped.
    """
    dim, dim_v = rounded(dim), rounded(dim_v)
    if itemsize == 1:
        return _tile_8bit(dim, local=mask == "local", softcap=softcap)
    return _tile_16bit(dim, dim_v, mask, vllm=build == "vllm", one_group=one_group)


def _tile_8bit(dim: int, *, local: bool, softcap: bool) -> tuple[int, int]:
    both = local and softcap
    return {
        64: (192, 160),
        96: (192, 128),
        128: (128, 192 if both else 224),
        192: (128, 128 if both else 160),
    }.get(dim, (128, 64 if local else 128))


def _tile_16bit(dim: int, dim_v: int, mask: str, *, vllm: bool, one_group: bool) -> tuple[int, int]:
    local = mask == "local"
    if dim == 64:
        if dim_v == 512:
            return 64, 64
        if dim_v == 256:
            return 128, 112 if vllm else 96
        if one_group:
            return 64, 192
        return 192, {"causal": 128, "local": 160 if vllm else 128, "full": 192}[mask]
    return {
        96: (192, 128 if local else 144),
        128: (64 if one_group else 128, 176 if mask == "full" else 128),
        192: (128, 96 if local else 128 if dim_v <= 128 else 112),
    }.get(dim, (128, 64 if local else 80))


def rounded(dim: int) -> int:
    """The head dimension that the kernel is built for."""
    return next((one for one in _ROUNDED if dim <= one), _ROUNDED[-1])


def paths(cache: Cache, call: Call) -> list[Path]:
    """How the paged kernel reads the cache, for the mask of the call or for each.

    TMA is used when the page size is a multiple of kBlockN and seqlen_q * (heads / KV heads) is over kBlockM
    (get_pagedkv_tma); else each thread copies with cp.async.
    """
    return [_path(cache, call, mask) for mask in (MASKS if call.mask is None else (call.mask,))]


def _path(cache: Cache, call: Call, mask: str) -> Path:
    dim, vllm = cache.k.shape[-1], call.build == "vllm"
    taken = mask
    if mask == "causal" and call.seqlen_q == 1 and not 64 < dim <= 128:
        taken = "full"  # One query row sees all keys; the API drops the mask, but for the dims where it wants kBlockN 128.
    one_group = vllm and dim == 128 and 0 < call.seqlen_q <= 64
    block_m, block_n = tile(
        dim,
        cache.v.shape[-1],
        cache.k.itemsize,
        taken,
        build=call.build,
        one_group=one_group,
        softcap=call.softcap,
    )
    tma, why = _chooses(cache, call, mask, block_m, block_n)
    return Path(mask, block_m, block_n, tma, why)


def _chooses(cache: Cache, call: Call, mask: str, block_m: int, block_n: int) -> tuple[bool | None, str]:
    if call.appends:
        return False, "new keys or left padding"
    if call.build == "vllm" and mask == "local":
        return False, "vLLM's build never does with a local mask"
    if cache.page_size % block_n:
        return False, f"page size {cache.page_size} is no multiple of {block_n}"
    group = call.q_heads // cache.heads if cache.heads else 0
    if not (call.seqlen_q and group):
        return None, f"if seqlen_q x heads / KV heads is over {block_m}"
    rows = call.seqlen_q * group
    over = rows > block_m
    return over, f"{rows} query rows a KV head are {'' if over else 'not '}over {block_m}"


def problems(
    cache: Cache,
    call: Call,
    q: Strided | None = None,
    table: Strided | None = None,
    descales: Mapping[str, Strided] | None = None,
) -> list[Problem]:
    """All that FlashAttention-3 refuses, copies, or reads the slower way.

    Args:
        cache: K and V.
        call: the call.
        q: queries, (batch, tokens, heads, dim) or (tokens, heads, dim); None when they are not given.
        table: page table.
        descales: of `q`, `k`, `v`.
    """
    found = [*_dtypes(cache, q), *_shapes(cache, call, q), *_head_dims(cache), *_strides(cache, call, q)]
    if table is not None:
        found += _table(cache, table, q)
    found += _descales(cache, q, table, descales or {})
    if cache.kind == "paged":
        found += _slow_path(cache, call)
    return found


def takers(cache: Cache) -> list[Fit]:
    """How each consumer can take the cache: `fits`, but `no` where FlashAttention-3 refuses it whatever the call is."""
    return [_unless_refused(fit, cache) if fit.consumer.startswith(FA3) else fit for fit in fits(cache)]


def _unless_refused(fit: Fit, cache: Cache) -> Fit:
    refused = [*_dtypes(cache, None), *_shapes(cache, Call(), None), *_head_dims(cache)]
    if not fit.copied_b:
        # A copy, where one is needed anyway, is aligned.
        refused += [*_alignment("K", cache.k), *_alignment("V", cache.v)]
    return replace(fit, how=f"no: {refused[0].what}", copied_b=0) if refused else fit


def _problem(
    kind: str,
    what: str,
    about: Strided,
    change: str = "",
    *,
    said: str = "",
    level: Level = "problem",
    facts: dict[str, Value] | None = None,
) -> Problem:
    return Problem(kind, what, about.where, about.line, said, change, level, facts or {})


def _dtypes(cache: Cache, q: Strided | None) -> Iterator[Problem]:
    k, v = cache.k, cache.v
    if k.dtype not in (*HALF, FP8):
        change = {
            "uint8": "say with --dtype what its bytes are viewed as; SGLang stores FP8 so",
            "float8_e5m2": f"store {FP8}",
        }.get(k.dtype, f"store {', '.join(HALF)} or {FP8}")
        yield _problem(
            "dtype",
            f"K ({k.name}) is {k.dtype}, which the kernel does not take",
            k,
            change,
            said="FlashAttention only supports fp16, bf16, and fp8_e4m3 data type",
        )
    for name, other in (("V", v), ("q", q)):
        if other is not None and other.dtype != k.dtype:
            mixed = FP8 in (other.dtype, k.dtype)
            yield _problem(
                "dtype_mismatch",
                f"{name} ({other.name}) is {other.dtype} and K ({k.name}) is {k.dtype}",
                other,
                "quantise q to FP8 with its descale: there is no kernel for an FP8 cache with 16-bit queries"
                if mixed and name == "q"
                else "q, K and V have one dtype",
                said="query and key must have the same dtype"
                if name == "q"
                else "query and value must have the same dtype",
            )


def _shapes(cache: Cache, call: Call, q: Strided | None) -> Iterator[Problem]:
    k, v = cache.k, cache.v
    if k.shape[:-1] != v.shape[:-1]:
        yield _problem(
            "shape", f"K is {shape_of(k)} and V is {shape_of(v)}: only their head dims may differ", v
        )
    heads = q.shape[-2] if q is not None and q.rank in (3, 4) else call.q_heads
    about = q or k
    if heads and cache.heads and heads % cache.heads:
        yield _problem(
            "heads",
            f"{heads} heads of q are no multiple of {cache.heads} KV heads",
            about,
            said="Number of heads in key/value must divide number of heads in query",
        )
    if q is None:
        return
    if q.rank not in (3, 4):
        yield _problem("shape", f"q is {shape_of(q)}: it has 4 dimensions, or 3 with cu_seqlens_q", q)
    elif q.shape[-1] != k.shape[-1]:
        yield _problem("shape", f"head dim is {q.shape[-1]} for q and {k.shape[-1]} for K", q)
    if cache.kind == "dense" and q.rank == 4 and q.shape[0] != k.shape[0]:
        yield _problem(
            "shape",
            f"batch is {q.shape[0]} for q and {k.shape[0]} for K",
            q,
            "give cache_batch_idx when the cache holds more sequences",
            said="batch_size must be equal to batch_size_k",
        )


def _head_dims(cache: Cache) -> Iterator[Problem]:
    k, v = cache.k, cache.v
    dim, dim_v = k.shape[-1], v.shape[-1]
    step = 16 if k.itemsize == 1 else 8
    if dim > MAX_HEAD_DIM:
        yield _problem("head_dim", f"head dim {dim} is over {MAX_HEAD_DIM}", k)
    for name, one, length in (("K", k, dim), ("V", v, dim_v)):
        if length % step:
            yield _problem(
                "head_dim",
                f"head dim {length} of {name} is no multiple of {step}, as {k.dtype} needs",
                one,
                f"pad it to {-(-length // step) * step}",
                said=f"head_size{'' if name == 'K' else '_v'} should be a multiple of {step}",
            )
    if dim != dim_v and not ((128 < dim <= 192 and 96 < dim_v <= 128) or (dim <= 64 and dim_v <= 512)):
        yield _problem(
            "head_dim",
            f"head dims {dim} for K and {dim_v} for V have no kernel",
            v,
            "K of 136 to 192 with V of 104 to 128, or K up to 64 with V up to 512, both on Hopper only",
        )
    if dim_v > MAX_HEAD_DIM and k.itemsize == 1:
        yield _problem("head_dim", f"head dim {dim_v} of V needs fp16 or bf16", v)


def copies(cache: Cache, call: Call, q: Strided | None) -> list[tuple[str, Strided]]:
    """The tensors of q, K and V that the Python wrapper copies before each call, without a word."""
    asserted = call.build == "upstream" and cache.kind == "paged"
    found = [] if q is None or q.strides[-1] == 1 else [("q", q)]
    if asserted:
        return found
    if cache.k.strides[-1] != 1:
        found.append(("K", cache.k))
    if cache.v.strides[-1] != 1 and (call.build == "vllm" or cache.v.strides[-3] != 1):
        found.append(("V", cache.v))
    return found


def _strides(cache: Cache, call: Call, q: Strided | None) -> Iterator[Problem]:
    copied = copies(cache, call, q)
    for name, one in copied:
        step_b = one.size_b * call.layers
        yield _problem(
            "silent_copy",
            f"{name} ({one.name}) has stride {one.strides[-1]} in its last dimension: {_copier(name, call)} "
            f"calls .contiguous() on all of it each time",
            one,
            "allocate it with the head dim last in memory, and transpose other dimensions instead",
            facts={
                "copied_b_per_call": one.size_b,
                "calls_per_step": call.layers,
                "read_b_per_step": step_b,
                "written_b_per_step": step_b,
            },
        )
    names = {name for name, _one in copied}
    for name, one in (("K", cache.k), ("V", cache.v)):
        if one.strides[-1] != 1 and name not in names:
            paged = cache.kind == "paged"
            yield _problem(
                "last_dim",
                f"{name} ({one.name}) has stride {one.strides[-1]} in its last dimension, which is refused",
                one,
                "allocate it with the head dim last in memory",
                said=f"{name.lower()}_cache must have contiguous last dimension"
                if paged
                else "Input tensor must have contiguous last dimension",
            )
    for name, given in (("q", q), ("K", cache.k), ("V", cache.v)):
        # What is copied is aligned after it, and what is refused is not read.
        if given is not None and given.strides[-1] == 1:
            yield from _alignment(name, given)


def _copier(name: str, call: Call) -> str:
    """The function of the Python wrapper that copies."""
    if call.build == "vllm":
        return "vLLM's flash_attn_varlen_func"
    if name == "q":
        return "flash_attn_func, _varlen_func or _with_kvcache"
    return "flash_attn_func or _varlen_func (not _with_kvcache, which refuses it)"


def _alignment(name: str, one: Strided) -> Iterator[Problem]:
    for dim, (stride, length) in enumerate(zip(one.strides[:-1], one.shape[:-1], strict=True)):
        if length > 1 and stride * one.itemsize % ALIGN_B:
            yield _problem(
                "alignment",
                f"dimension {dim} of {name} ({one.name}) steps by {stride * one.itemsize} bytes, no multiple of {ALIGN_B}",
                one,
                "pad the dimension inside it",
                facts={"stride_b": stride * one.itemsize},
            )
    if one.address % ALIGN_B:
        yield _problem(
            "alignment",
            f"{name} ({one.name}) begins {one.address % ALIGN_B} bytes after a multiple of {ALIGN_B}",
            one,
            "slice at a multiple of 16 bytes",
            facts={"offset_b": one.address % ALIGN_B},
        )


def _table(cache: Cache, table: Strided, q: Strided | None) -> Iterator[Problem]:
    if cache.kind != "paged":
        yield _problem(
            "page_table",
            f"a page table comes with a cache read as {cache.kind}",
            table,
            "say --layout, or leave it out",
        )
        return
    if table.dtype != "int32":
        yield _problem(
            "page_table",
            f"the page table is {table.dtype}",
            table,
            "int32",
            said="page_table must have dtype torch.int32",
        )
    if table.rank != 2:
        yield _problem("page_table", f"the page table is {shape_of(table)}, not (batch, pages)", table)
        return
    if q is not None and q.rank == 4 and table.shape[0] != q.shape[0]:
        yield _problem(
            "page_table", f"batch is {q.shape[0]} for q and {table.shape[0]} for the page table", table
        )
    if table.strides[-1] != 1:
        yield _problem(
            "silent_copy",
            f"the page table ({table.name}) has stride {table.strides[-1]} in its last dimension and is copied each call",
            table,
            facts={"copied_b_per_call": table.size_b},
        )


def _descales(
    cache: Cache, q: Strided | None, table: Strided | None, descales: Mapping[str, Strided]
) -> Iterator[Problem]:
    batch = _batch(cache, q, table)
    for name, one in descales.items():
        if cache.k.dtype != FP8:
            yield _problem(
                "descale",
                f"{name}_descale is given, but K is {cache.k.dtype}: it is ignored",
                one,
                level="note",
            )
            continue
        if one.dtype != "float32":
            yield _problem("descale", f"{name}_descale is {one.dtype}", one, "float32")
        wanted = f"({batch or 'batch'}, {cache.heads})"
        if one.rank != 2 or one.shape[1] != cache.heads or (batch and one.shape[0] != batch):
            yield _problem(
                "descale",
                f"{name}_descale is {shape_of(one)}, not {wanted}: one value for each sequence and KV head",
                one,
                f"descale.expand{wanted}: strides of 0 are taken",
            )


def _batch(cache: Cache, q: Strided | None, table: Strided | None) -> int:
    """Sequences of the call; 0 when unknown."""
    if table is not None and table.rank == 2:
        return table.shape[0]
    if q is not None and q.rank == 4:
        return q.shape[0]
    return cache.k.shape[0] if cache.kind == "dense" else 0


def _slow_path(cache: Cache, call: Call) -> Iterator[Problem]:
    """Pages that keep the kernel from TMA where it would use it."""
    if call.appends or not (call.seqlen_q and call.q_heads):
        return
    rows = call.seqlen_q * (call.q_heads // cache.heads) if cache.heads else 0
    for path in paths(cache, call):
        if (
            rows > path.block_m
            and cache.page_size % path.block_n
            and not (call.build == "vllm" and path.mask == "local")
        ):
            yield _problem(
                "no_tma",
                f"pages of {cache.page_size} tokens are read with cp.async instead of TMA ({path.mask} mask): "
                f"{rows} query rows would use it if the page size were a multiple of {path.block_n}",
                cache.k,
                f"pages of a multiple of {path.block_n} tokens",
                level="problem" if call.mask else "note",
                facts={"page_size": cache.page_size, "block_m": path.block_m, "block_n": path.block_n},
            )
