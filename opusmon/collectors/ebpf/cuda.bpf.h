/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* What all programs know of CUDA's driver API. */
#pragma once

#include "portable.bpf.h"

#define WHOLE_CONTEXT 0xffffffffffffffffULL /* stands for a stream: all of them, or an event's that is not known */
#define CONFIG_STREAM 32                    /* offsetof(CUlaunchConfig, hStream) */

/* CU_STREAM_LEGACY (1) is the null stream; in the _ptsz and _ptds variants null is the per-thread default (2). */
static __always_inline u64 known_as(u64 stream, int per_thread)
{
    if (stream == 1)
        return 0;
    return stream == 0 && per_thread ? 2 : stream;
}
