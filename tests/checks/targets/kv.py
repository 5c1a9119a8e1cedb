"""KV caches that each break one rule, on a line of its own; and some that break none."""

import torch

PAGES, PAGE, HEADS, DIM = 8, 64, 4, 128


def pages(dtype=torch.bfloat16, page=PAGE, dim=DIM):
    return torch.zeros(PAGES, page, HEADS, dim, dtype=dtype)


def clean():
    return {
        "key_cache": pages(page=128),
        "value_cache": pages(page=128),
        "query": torch.zeros(2, 64, 32, DIM, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
    }


def silent_copy():
    k = torch.zeros(2, HEADS, DIM, 512, dtype=torch.bfloat16)
    k = k.permute(0, 3, 1, 2)  # planted: silent_copy
    v = torch.zeros(2, 512, HEADS, DIM, dtype=torch.bfloat16)
    return k, v


def refused_stride():
    cache = clean()
    k = torch.zeros(PAGES, DIM, HEADS, 128, dtype=torch.bfloat16)
    cache["key_cache"] = k.transpose(1, 3)  # planted: last_dim
    return cache


def mixed():
    cache = clean()
    cache["key_cache"] = pages(page=128).to(torch.float8_e4m3fn)
    cache["value_cache"] = pages(page=128).to(torch.float8_e4m3fn)
    cache["query"] = torch.zeros(2, 64, 32, DIM, dtype=torch.bfloat16)  # planted: dtype_mismatch
    return cache


def odd_head_dim():
    k = torch.zeros(2, 512, HEADS, 72).to(torch.float8_e4m3fn)  # planted: head_dim
    v = torch.zeros(2, 512, HEADS, 80).to(torch.float8_e4m3fn)
    return k[..., :72], v[..., :72]


def misaligned():
    k = torch.zeros(2, 512, HEADS, DIM + 4, dtype=torch.bfloat16)
    k = k[..., 4:]  # planted: alignment
    return k, torch.zeros(2, 512, HEADS, DIM, dtype=torch.bfloat16)


def long_table():
    cache = clean()
    cache["block_table"] = torch.zeros(2, 4, dtype=torch.int64)  # planted: page_table
    return cache


def descale_of_q_heads():
    fp8 = torch.float8_e4m3fn
    return {
        "k": pages(fp8, 128),
        "v": pages(fp8, 128),
        "q": torch.zeros(2, 64, 32, DIM).to(fp8),
        "page_table": torch.zeros(2, 4, dtype=torch.int32),
        "q_descale": torch.ones(2, 32),  # planted: descale
        "k_descale": torch.ones(1).expand(2, HEADS),
        "v_descale": torch.ones(2, HEADS),
    }


def small_pages():
    cache = clean()
    cache["key_cache"] = torch.zeros(PAGES, 16, HEADS, DIM, dtype=torch.bfloat16)  # planted: no_tma
    cache["value_cache"] = pages(page=16)
    return cache


def heads_that_do_not_divide():
    cache = clean()
    cache["query"] = torch.zeros(2, 64, 30, DIM, dtype=torch.bfloat16)  # planted: heads
    return cache


def batch_of_another_size():
    k = torch.zeros(4, 512, HEADS, DIM, dtype=torch.bfloat16)
    q = torch.zeros(2, 1, 32, DIM, dtype=torch.bfloat16)  # planted: shape
    return k, torch.zeros_like(k), q


def bytes_of_fp8():
    k = torch.zeros(256 + 16, HEADS, DIM, dtype=torch.uint8)  # planted: dtype
    return {"k_buffer": k, "v_buffer": torch.zeros_like(k)}


def vllm():
    return torch.zeros(2, PAGES, 16, HEADS, DIM, dtype=torch.bfloat16)


def nothing():
    return {"k": None}


def raises():
    raise RuntimeError("no cache today")  # planted: error
