"""What is known of a tensor, and how the tensors of a KV cache are read.

Pure: shapes, strides and addresses are numbers, and a view is arithmetic on them.

Layouts, by project and file:
FlashAttention-3 (Dao-AILab/flash-attention, hopper/flash_api.cpp): (batch, tokens, heads, dim),
(tokens, heads, dim) with cu_seqlens_k, (pages, page size, heads, dim) with a page table.
FlashInfer (docs/tutorials/kv_layout.rst): NHD is (.., tokens, heads, dim), HND (.., heads, tokens, dim); its paged
kernels take any strides that are the same for K and V (csrc/batch_prefill.cu).
vLLM (vllm/v1/attention/backends/flash_attn.py 5704f34 and flashinfer.py): (2, blocks, block size, heads, dim), and
(blocks, 2, block size, heads, dim) for FlashInfer. Its KVCacheLayout (vllm/v1/kv_cache_layout.py 14f7a27) keeps K and
V of a token in one content dimension: such a cache is given here as the K and V views that vLLM makes of it.
SGLang (python/sglang/srt/mem_cache/memory_pool.py): per layer (size + page size, heads, dim), slot 0 for padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

FA3 = "FlashAttention-3"
"""How the names of the rows begin that are this kernel's."""
LAYOUTS = ("auto", "dense", "varlen", "paged", "nhd", "hnd", "vllm", "sglang")
KV = 2
"""Length of the dimension that holds K and V."""


class LayoutError(ValueError):
    """The tensors do not fit the layout, or more than one; one line for the user."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A strided tensor without its data.

    Attributes:
        name: as it is called where it comes from.
        shape: length of each dimension.
        strides: elements from one to the next of each dimension.
        dtype: as torch names it, without `torch.`.
        itemsize: bytes of an element.
        address: of the first element in bytes; on a GPU where it lies, else from the start of its allocation.
        device: as `cuda:0`; "" when it comes from a file.
        where: the user's line that gave it this shape, as `file.py:12`; "" when unknown.
        line: that line.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    address: int = 0
    device: str = ""
    where: str = ""
    line: str = ""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def size_b(self) -> int:
        """Bytes of its elements, which is what a copy of it reads and what it writes."""
        return self.numel * self.itemsize

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def select(self, dim: int, index: int) -> Strided:
        """The view `tensor[..., index, ...]`."""
        return replace(
            self,
            name=f"{self.name}[{':, ' * dim}{index}]",
            shape=self.shape[:dim] + self.shape[dim + 1 :],
            strides=self.strides[:dim] + self.strides[dim + 1 :],
            address=self.address + index * self.strides[dim] * self.itemsize,
        )

    def permute(self, order: Sequence[int]) -> Strided:
        """The view with the dimensions in another order."""
        return replace(
            self,
            shape=tuple(self.shape[dim] for dim in order),
            strides=tuple(self.strides[dim] for dim in order),
        )

    def split(self, dim: int, length: int) -> Strided:
        """The view in which a dimension becomes two, the second of this length, which divides it."""
        return replace(
            self,
            shape=(*self.shape[:dim], self.shape[dim] // length, length, *self.shape[dim + 1 :]),
            strides=(
                *self.strides[:dim],
                self.strides[dim] * length,
                self.strides[dim],
                *self.strides[dim + 1 :],
            ),
        )

    def view_as(self, dtype: str, itemsize: int) -> Strided:
        """The view `tensor.view(dtype)` of a tensor of bytes.

        Args:
            dtype: as torch names it.
            itemsize: bytes of an element of it.

        Raises:
            LayoutError: torch makes no such view.
        """
        told = f"{self.name} is {shape_of(self)}, strides {self.strides}: its bytes are no {dtype}, for"
        if itemsize > 1:
            if not self.rank or self.shape[-1] % itemsize:
                raise LayoutError(f"{told} its last dimension is no multiple of {itemsize}")
            if self.strides[-1] != 1:
                raise LayoutError(f"{told} its last stride is not 1")
            if any(stride % itemsize for stride in self.strides[:-1]) or self.address % itemsize:
                raise LayoutError(f"{told} its elements do not all begin at a multiple of {itemsize} bytes")
        return replace(
            self,
            shape=(*self.shape[:-1], *(length // itemsize for length in self.shape[-1:])),
            strides=(*(stride // itemsize for stride in self.strides[:-1]), *self.strides[-1:]),
            dtype=dtype,
            itemsize=itemsize,
        )

    def joins(self, dim: int) -> bool:
        """Whether a view can make one dimension of this and the next."""
        outer, inner = self.strides[dim], self.strides[dim + 1]
        return 1 in self.shape[dim : dim + 2] or outer == inner * self.shape[dim + 1]

    def order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Names of the dimensions from the slowest to the fastest in memory; those of length 1 are left out."""
        told = [
            (stride, axis)
            for stride, axis, length in zip(self.strides, axes, self.shape, strict=True)
            if length > 1
        ]
        return tuple(axis for _stride, axis in sorted(told, key=lambda one: -one[0]))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose elements lie one after the other."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


AXES = {
    "dense": ("batch", "tokens", "heads", "dim"),
    "varlen": ("tokens", "heads", "dim"),
    "paged": ("pages", "tokens", "heads", "dim"),
}
"""Dimensions of K and V as FlashAttention-3 takes them."""


_TAKE_APART = {0: "[0] and [1]", 1: "[:, 0] and [:, 1]"}
"""The view that gives K and V, by the dimension that holds both."""

_VIEWS = {
    ("nhd", "hnd"): "transpose(1, 2)",
    ("nhd", "slots"): "flatten(0, 1)",
    ("hnd", "nhd"): "transpose(1, 2)",
    ("hnd", "slots"): "transpose(1, 2).flatten(0, 1)",
    ("slots", "nhd"): "unflatten(0, (-1, page size))",
    ("slots", "hnd"): "unflatten(0, (-1, page size)).transpose(1, 2)",
}
"""The view that makes one order of dimensions of another."""


@dataclass(frozen=True, slots=True)
class Cache:
    """K and V in FlashAttention-3's order of dimensions.

    Attributes:
        kind: key of `AXES`.
        k, v: views of the tensors given.
        given: order of dimensions of the tensors given: `nhd`, `hnd` or `slots`.
        joined: dimension of the tensor given that holds K and V; None when they are tensors of their own.
    """

    kind: str
    k: Strided
    v: Strided
    given: str = "nhd"
    joined: int | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 when it is not paged."""
        return self.k.shape[1] if self.kind == "paged" else 0

    @property
    def heads(self) -> int:
        """Heads of K and V."""
        return self.k.shape[-2]

    @property
    def size_b(self) -> int:
        """Bytes of K and V."""
        return self.k.size_b + self.v.size_b

    def view(self, wanted: str) -> str:
        """What makes K and V in another order of dimensions of the tensors given; "" when they are those."""
        steps = [
            "" if self.joined is None else _TAKE_APART[self.joined],
            _VIEWS.get((self.given, wanted), ""),
        ]
        return ", then ".join(filter(None, steps))


def read(
    tensors: Sequence[Strided], layout: str = "auto", *, page_size: int = 0, table: bool = False
) -> Cache:
    """The cache that one tensor with K and V, or a pair of tensors, is.

    Args:
        tensors: K and V together, or K, V.
        layout: one of `LAYOUTS`.
        page_size: tokens of a page when the user says it.
        table: there is a page table.

    Raises:
        LayoutError: they do not fit the layout, or `auto` fits more than one.
    """
    k, v, joined = _pair(tensors)
    if k.rank != v.rank:
        raise LayoutError(f"K has {k.rank} dimensions and V {v.rank}")
    if layout == "auto":
        layout = _guess(k, joined, page_size, table=table)
    rank = 3 if layout in ("varlen", "sglang") else 4
    if k.rank != rank:
        raise LayoutError(f"{layout} needs {rank} dimensions for each of K and V; {k.name} is {shape_of(k)}")
    if layout == "hnd":
        k, v = k.permute((0, 2, 1, 3)), v.permute((0, 2, 1, 3))
    if layout == "sglang":
        k, v = (_paged(one, page_size or 1) for one in (k, v))
    kind = layout if layout in AXES else "paged"
    cache = Cache(kind, k, v, {"hnd": "hnd", "sglang": "slots"}.get(layout, "nhd"), joined)
    if kind == "paged" and page_size not in (0, cache.page_size):
        raise LayoutError(f"--page-size is {page_size}, and {layout} reads pages of {cache.page_size}")
    return cache


def shape_of(tensor: Strided) -> str:
    """As `(2, 16, 64)`."""
    return str(tensor.shape)


def _paged(slots: Strided, page_size: int) -> Strided:
    if slots.shape[0] % page_size:
        raise LayoutError(f"{slots.name} has {slots.shape[0]} slots, no multiple of --page-size {page_size}")
    return slots.split(0, page_size)


def _pair(tensors: Sequence[Strided]) -> tuple[Strided, Strided, int | None]:
    """K and V, and the dimension of the tensor given that holds both."""
    if len(tensors) != 1:
        k, v = tensors
        return k, v, None
    (whole,) = tensors
    if whole.rank not in (4, 5):
        raise LayoutError(f"{whole.name} is {shape_of(whole)}: K and V together have 4 or 5 dimensions")
    dims = [dim for dim in ((0, 1) if whole.rank == 5 else (0,)) if whole.shape[dim] == KV]
    if len(dims) != 1:
        why = "dimensions 0 and 1 may both hold K and V" if dims else "no dimension of length 2 holds K and V"
        raise LayoutError(f"{whole.name} is {shape_of(whole)}: {why}; give them as --k and --v")
    return whole.select(dims[0], 0), whole.select(dims[0], 1), dims[0]


def _guess(k: Strided, joined: int | None, page_size: int, *, table: bool) -> str:
    if k.rank == 3:
        return "sglang" if page_size or table else "varlen"
    if k.rank != 4:
        raise LayoutError(f"{k.name} is {shape_of(k)}: K and V have 3 dimensions (tokens, heads, dim) or 4")
    if not page_size:
        return "nhd" if table or joined is not None else "dense"
    fitting = [name for name, dim in (("nhd", 1), ("hnd", 2)) if k.shape[dim] == page_size]
    if len(fitting) != 1:
        why = "may be NHD or HND: say --layout" if fitting else f"has no pages of {page_size}"
        raise LayoutError(f"{k.name} is {shape_of(k)}, which {why}")
    return fitting[0]


@dataclass(frozen=True, slots=True)
class Fit:
    """How a consumer can take a cache.

    Attributes:
        consumer: kernel or engine.
        wants: the shape it takes.
        how: `as is`, `by view: ...`, `only by a copy`, or `no: ` and why it cannot.
        copied_b: bytes of the copy, 0 without.
    """

    consumer: str
    wants: str
    how: str
    copied_b: int = 0


def fits(cache: Cache) -> list[Fit]:
    """How each consumer that knows this kind of cache can take it, by its layout alone."""
    flat = cache.kind != "varlen" and cache.k.joins(0) and cache.v.joins(0)
    varlen = f"{FA3} varlen"
    if cache.kind == "varlen":
        return [_fit(cache, varlen, "(tokens, heads, dim)", cache.view("nhd"))]
    if cache.kind == "dense":
        return [
            _fit(cache, FA3, "(batch, tokens, heads, dim)", cache.view("nhd")),
            _fit(cache, varlen, "(tokens, heads, dim)", cache.view("slots"), possible=flat),
        ]
    same = cache.k.strides == cache.v.strides
    nhd, hnd = "(pages, page size, heads, dim)", "(pages, heads, page size, dim)"
    return [
        _fit(cache, f"{FA3} paged", nhd, cache.view("nhd")),
        _fit(cache, "FlashInfer NHD", f"{nhd}, strides of K and V equal", cache.view("nhd"), possible=same),
        _fit(cache, "FlashInfer HND", f"{hnd}, strides of K and V equal", cache.view("hnd"), possible=same),
        _vllm(cache, "vLLM FlashAttention", 0, "(2, blocks, block size, heads, dim)"),
        _vllm(cache, "vLLM FlashInfer", 1, "(blocks, 2, block size, heads, dim)"),
        _fit(cache, "SGLang, a layer", "(slots, heads, dim)", cache.view("slots"), possible=flat),
    ]


def _vllm(cache: Cache, consumer: str, dim: int, wants: str) -> Fit:
    if cache.page_size % 16:
        return Fit(consumer, wants, "no: its blocks are multiples of 16 tokens")
    steps = [
        "transpose(0, 1)" if cache.joined != dim else "",
        "transpose(2, 3)" if cache.given == "hnd" else "",
    ]
    view = ", then ".join(filter(None, steps))
    return _fit(cache, consumer, wants, view, possible=cache.joined is not None)


def _fit(cache: Cache, consumer: str, wants: str, view: str, *, possible: bool = True) -> Fit:
    if not possible or cache.k.strides[-1] != 1 or cache.v.strides[-1] != 1:
        return Fit(consumer, wants, "only by a copy", cache.size_b)
    return Fit(consumer, wants, f"by view: {view}" if view else "as is")
