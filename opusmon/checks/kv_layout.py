"""`check kv-layout`: does a KV cache fit the attention kernels, or is it copied each step?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from opusmon.checks import kv_load, kv_rules, kv_tensor, tiles
from opusmon.checks.kv_rules import FP8, Call
from opusmon.checks.kv_tensor import AXES, Cache, LayoutError, Strided
from opusmon.checks.result import Fact, Missing, Problem, Result, Table
from opusmon.checks.target import TargetError, load
from opusmon.checks.worker import Options, Say
from opusmon.text import counted

RULES = "rules read in the source of FlashAttention-3 (named in opusmon/checks/kv_rules.py)"


def check(options: Options, say: Say) -> Result:
    """Look at the cache of `target`, at the tile of `tile`, or both.

    Args:
        options: those of the command line (cli/check.py); `recorder` is the command that runs opusmon.
        say: names the stage that begins.

    Raises:
        TargetError: no such tensors, or they fit no layout.
    """
    target = str(options.get("target") or "")
    result = Result("kv-layout", target or str(options.get("tile") or ""))
    if not target and not options.get("tile"):
        raise TargetError("nothing to look at: give a dump or TARGET, or --tile ROWSxCOLUMNS")
    if target:
        _cache(result, target, options, say)
    if options.get("tile"):
        tiles.look(result, options, say)
    return result


def _cache(result: Result, target: str, options: Options, say: Say) -> None:
    if kv_load.is_file(target):
        say(f"reading {target}")
        with warnings.catch_warnings():
            # What torch remarks about an odd file comes with the error, if there is one.
            warnings.simplefilter("ignore")
            tensors = kv_load.from_file(Path(target))
        result.basis = f"static: shapes and strides of {target}; {RULES}"
    else:
        say("loading the target")
        make = load(target)
        say("calling the target")
        tensors = kv_load.from_target(make)
        devices = sorted({tensor.device for tensor in tensors.values()})
        result.basis = f"static: shapes, strides and addresses of tensors on {', '.join(devices)}; {RULES}"
    q, table = (kv_load.choose(tensors, role, options.get(role)) for role in ("q", "page_table"))
    key_value = _key_value(tensors, options)
    try:
        if (dtype := options.get("dtype")) is not None:
            result.problems += _no_bytes(dtype, [*key_value, *([] if q is None else [q])])
            key_value = [_viewed(one, dtype) for one in key_value]
            q = None if q is None else _viewed(q, dtype)
        cache = kv_tensor.read(
            key_value,
            options.get("layout") or "auto",
            page_size=options.get("page_size") or 0,
            table=table is not None,
        )
    except LayoutError as error:
        raise TargetError(str(error)) from error
    call = _call(options, q)
    descales = {
        name: one
        for name in ("q", "k", "v")
        if (one := kv_load.choose(tensors, f"{name}_descale", options.get(f"{name}_descale"))) is not None
    }
    result.problems += kv_rules.problems(cache, call, q, table, descales)
    _facts(result, cache, call, q, descales)
    _missing(result, cache, call, q)


def _viewed(tensor: Strided, dtype: str) -> Strided:
    """Bytes as what they are viewed as; what is no uint8 as it is."""
    itemsize = kv_load.itemsize_of(dtype)
    return tensor.view_as(dtype, itemsize) if tensor.dtype == "uint8" else tensor


def _no_bytes(dtype: str, tensors: Sequence[Strided]) -> list[Problem]:
    """A note where --dtype changes nothing."""
    if any(one.dtype == "uint8" for one in tensors):
        return []
    what = f"--dtype {dtype} is what uint8 is viewed as, and none of q, K and V is uint8: it changes nothing"
    return [Problem("dtype", what, level="note")]


def _key_value(tensors: Mapping[str, Strided], options: Options) -> list[Strided]:
    """K and V in one tensor, or K, V."""
    said_pair = options.get("k") or options.get("v")
    joined = None if said_pair else kv_load.choose(tensors, "kv", options.get("kv"))
    if joined is not None:
        return [joined]
    pair = {name: kv_load.choose(tensors, name, options.get(name)) for name in ("k", "v")}
    found = [one for one in pair.values() if one is not None]
    if len(found) == len(pair):
        return found
    lacking = " and ".join(name for name, one in pair.items() if one is None)
    raise TargetError(
        f"no tensor is named like {lacking}: say --k and --v, or --kv; there is {kv_load.listed(tensors)}"
    )


def _call(options: Options, q: Strided | None) -> Call:
    q_heads = q.shape[-2] if q is not None and q.rank in (3, 4) else 0
    seqlen_q = q.shape[1] if q is not None and q.rank == 4 else 0
    layout = options.get("layout") or "auto"
    build = options.get("build") or ("vllm" if layout == "vllm" else "upstream")
    return Call(
        build=build,
        mask=options.get("mask"),
        q_heads=options.get("q_heads") or q_heads,
        seqlen_q=options.get("seqlen_q") or seqlen_q,
        softcap=bool(options.get("softcap")),
        appends=bool(options.get("appends")),
        layers=options.get("layers") or 1,
    )


def _facts(
    result: Result, cache: Cache, call: Call, q: Strided | None, descales: Mapping[str, Strided]
) -> None:
    add = result.facts.append
    hint = " (one of pages needs --page-size or a page table)" if cache.kind == "dense" else ""
    add(Fact("kind", cache.kind, f"read as {cache.kind}{hint}, FlashAttention-3 of {call.build}"))
    if cache.page_size:
        add(Fact("page_size", cache.page_size, f"page size {cache.page_size} tokens"))
    for name, one in (("q", q), ("K", cache.k), ("V", cache.v)):
        if one is not None:
            text = f"{name} ({one.name}): {one.shape} {one.dtype}, strides {one.strides}, {_size(one.size_b)}"
            add(Fact(f"{name.lower()}_b", one.size_b, text))
    order = cache.k.order(AXES[cache.kind])
    add(
        Fact(
            "order", order_word(order), f"in memory, slowest first: {', '.join(order)} ({order_word(order)})"
        )
    )
    copied = kv_rules.copies(cache, call, q)
    copied_b = sum(one.size_b for _name, one in copied) * call.layers
    calls = f"{counted(call.layers, 'call')} (--layers)"
    text = f"silent copies of q, K and V: {_size(copied_b)} read and as many written per step of {calls}"
    add(Fact("copied_b_per_step", copied_b, text))
    if cache.k.dtype == FP8:
        _fp8(result, descales)
    rows = tuple((fit.consumer, fit.wants, fit.how, fit.copied_b) for fit in kv_rules.takers(cache))
    result.tables.append(Table("who takes it, and how", ("consumer", "wants", "how", "copied_b"), rows))
    if cache.kind == "paged":
        _paths(result, cache, call)
    else:
        add(Fact("loads", "tma", "on Hopper K and V are loaded with TMA: they are not paged"))


def order_word(order: tuple[str, ...]) -> str:
    """NHD or HND, when both are there to tell, and the head dim is innermost."""
    if not order or order[-1] != "dim":
        return "head dim not innermost"
    if "tokens" not in order or "heads" not in order:
        return "NHD and HND alike"
    return "NHD" if order.index("tokens") < order.index("heads") else "HND"


def _fp8(result: Result, descales: Mapping[str, Strided]) -> None:
    add = result.facts.append
    add(Fact("output_dtype", "bfloat16", "FP8 in, bfloat16 out"))
    add(
        Fact(
            "v_transposed",
            True,
            "V is transposed in the kernel, in shared memory: the tensor cores want FP8 operands K-major. "
            "V stored column-major would spare it, but the API refuses its stride",
        )
    )
    for name in ("q", "k", "v"):
        if name not in descales:
            add(Fact(f"{name}_descale", None, f"no {name}_descale given: the kernel takes 1"))


def _paths(result: Result, cache: Cache, call: Call) -> None:
    words = {True: "TMA", False: "cp.async", None: "depends"}
    found = kv_rules.paths(cache, call)
    rows = tuple((path.mask, path.block_m, path.block_n, words[path.tma], path.why) for path in found)
    result.tables.append(
        Table("how pages are read (Hopper)", ("mask", "kBlockM", "kBlockN", "loads", "why"), rows)
    )
    if len({path.tma for path in found}) == 1:
        word = words[found[0].tma]
        result.facts.append(
            Fact(
                "loads",
                word.lower(),
                f"pages are read with {word}" if word != "depends" else f"TMA {found[0].why}, else cp.async",
            )
        )


def _missing(result: Result, cache: Cache, call: Call, q: Strided | None) -> None:
    add = result.not_measured.append
    if cache.kind == "paged" and any(path.tma is None for path in kv_rules.paths(cache, call)):
        add(Missing("TMA or cp.async", "it depends on q: give it, or --q-heads and --seqlen-q"))
    if cache.kind == "paged" and call.mask is None:
        add(Missing("which mask", "not said (--mask); the table has all three"))
    if q is None:
        add(Missing("q's dtype, shape and strides", "no q is given (--q)"))
    if not cache.k.device.startswith("cuda"):
        where = f"the tensors are on {cache.k.device}" if cache.k.device else "a file has no addresses"
        add(
            Missing(
                "alignment of the allocation on a GPU", f"{where}: offsets within it are what was looked at"
            )
        )


def _size(size_b: int) -> str:
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_b >= step:
            return f"{size_b / step:.4g} {unit}"
    return f"{size_b} B"
