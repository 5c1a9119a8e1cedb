/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* One program per function and variant: `_pt` for those in which the null stream is the per-thread default. */
#pragma once

#include "stall_captures.bpf.h"

#define ON(name, action)                   \
    UPROBE int on_##name(struct pt_regs *ctx) \
    {                                      \
        return action;                     \
    }
#define ARG(n) PT_REGS_PARM##n(ctx)

ON(cuStreamSynchronize, begin(cuStreamSynchronize, known_as(ARG(1), 0), UNKNOWN, 1))
ON(cuStreamSynchronize_pt, begin(cuStreamSynchronize, known_as(ARG(1), 1), UNKNOWN, 1))
ON(cuEventSynchronize, begin(cuEventSynchronize, stream_of(ARG(1)), UNKNOWN, 1))
ON(cuCtxSynchronize, begin(cuCtxSynchronize, WHOLE_CONTEXT, UNKNOWN, 1))
ON(cuMemcpyHtoD_v2, begin(cuMemcpyHtoD_v2, 0, ARG(3), 1))
ON(cuMemcpyHtoD_v2_pt, begin(cuMemcpyHtoD_v2, 2, ARG(3), 1))
ON(cuMemcpyDtoH_v2, begin(cuMemcpyDtoH_v2, 0, ARG(3), 1))
ON(cuMemcpyDtoH_v2_pt, begin(cuMemcpyDtoH_v2, 2, ARG(3), 1))
ON(cuMemcpy, begin(cuMemcpy, 0, ARG(3), 1))
ON(cuMemcpy_pt, begin(cuMemcpy, 2, ARG(3), 1))
ON(cuMemcpy2D_v2, begin(cuMemcpy2D_v2, 0, UNKNOWN, 1))
ON(cuMemcpy2D_v2_pt, begin(cuMemcpy2D_v2, 2, UNKNOWN, 1))
ON(cuMemcpy3D_v2, begin(cuMemcpy3D_v2, 0, UNKNOWN, 1))
ON(cuMemcpy3D_v2_pt, begin(cuMemcpy3D_v2, 2, UNKNOWN, 1))

ON(cuMemAlloc_v2, begin(cuMemAlloc_v2, WHOLE_CONTEXT, ARG(2), 0))
ON(cuMemAllocAsync, begin(cuMemAllocAsync, known_as(ARG(3), 0), ARG(2), 0))
ON(cuMemAllocAsync_pt, begin(cuMemAllocAsync, known_as(ARG(3), 1), ARG(2), 0))
ON(cuMemCreate, begin(cuMemCreate, WHOLE_CONTEXT, ARG(2), 0))
ON(cuMemFree_v2, begin(cuMemFree_v2, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoad, begin(cuModuleLoad, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoadData, begin(cuModuleLoadData, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoadDataEx, begin(cuModuleLoadDataEx, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoadFatBinary, begin(cuModuleLoadFatBinary, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuLibraryLoadData, begin(cuLibraryLoadData, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuFuncLoad, begin(cuFuncLoad, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuInit, begin(cuInit, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuDevicePrimaryCtxRetain, begin(cuDevicePrimaryCtxRetain, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuCtxCreate, begin(cuCtxCreate, WHOLE_CONTEXT, UNKNOWN, 0))

/* Begin and end are no calls of the captured sequence. */
static __always_inline int capture(u32 call, u64 stream)
{
    u64 id = bpf_get_current_pid_tgid();
    struct call_t c = {.start = bpf_ktime_get_ns(), .stream = stream, .size = UNKNOWN, .call = call};
    count(HIT_ALWAYS);
    watch(id);
    if (MAP_UPDATE(calls, &id, &c))
        count(LOST_MAP);
    return 0;
}

ON(cuStreamBeginCapture_v2, capture(cuStreamBeginCapture_v2, known_as(ARG(1), 0)))
ON(cuStreamBeginCapture_v2_pt, capture(cuStreamBeginCapture_v2, known_as(ARG(1), 1)))
ON(cuStreamBeginCaptureToGraph, capture(cuStreamBeginCaptureToGraph, known_as(ARG(1), 0)))
ON(cuStreamBeginCaptureToGraph_pt, capture(cuStreamBeginCaptureToGraph, known_as(ARG(1), 1)))
ON(cuStreamEndCapture, capture(cuStreamEndCapture, known_as(ARG(1), 0)))
ON(cuStreamEndCapture_pt, capture(cuStreamEndCapture, known_as(ARG(1), 1)))

ON(cuGraphLaunch, seen(cuGraphLaunch, known_as(ARG(2), 0), HIT_ALWAYS))
ON(cuGraphLaunch_pt, seen(cuGraphLaunch, known_as(ARG(2), 1), HIT_ALWAYS))
ON(cuLaunchKernel, launch_at(cuLaunchKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 0))
ON(cuLaunchKernel_pt, launch_at(cuLaunchKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 1))
ON(cuLaunchKernelEx, launch_at(cuLaunchKernelEx, (void *)(ARG(1) + CONFIG_STREAM), 0))
ON(cuLaunchKernelEx_pt, launch_at(cuLaunchKernelEx, (void *)(ARG(1) + CONFIG_STREAM), 1))
ON(cuLaunchCooperativeKernel, launch_at(cuLaunchCooperativeKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 0))
ON(cuLaunchCooperativeKernel_pt, launch_at(cuLaunchCooperativeKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 1))
ON(cuMemcpyHtoDAsync_v2, seen(cuMemcpyHtoDAsync_v2, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyHtoDAsync_v2_pt, seen(cuMemcpyHtoDAsync_v2, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemcpyDtoHAsync_v2, seen(cuMemcpyDtoHAsync_v2, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyDtoHAsync_v2_pt, seen(cuMemcpyDtoHAsync_v2, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemcpyDtoDAsync_v2, seen(cuMemcpyDtoDAsync_v2, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyDtoDAsync_v2_pt, seen(cuMemcpyDtoDAsync_v2, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemcpyAsync, seen(cuMemcpyAsync, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyAsync_pt, seen(cuMemcpyAsync, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemsetD8Async, seen(cuMemsetD8Async, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemsetD8Async_pt, seen(cuMemsetD8Async, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemsetD32Async, seen(cuMemsetD32Async, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemsetD32Async_pt, seen(cuMemsetD32Async, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuEventRecord, recorded(ARG(1), known_as(ARG(2), 0)))
ON(cuEventRecord_pt, recorded(ARG(1), known_as(ARG(2), 1)))
ON(cuStreamWaitEvent, seen(cuStreamWaitEvent, known_as(ARG(1), 0), HIT_LAUNCH))
ON(cuStreamWaitEvent_pt, seen(cuStreamWaitEvent, known_as(ARG(1), 1), HIT_LAUNCH))

ON(cuLaunchKernel_result, result(ctx, cuLaunchKernel, HIT_LAUNCH))
ON(cuLaunchKernelEx_result, result(ctx, cuLaunchKernelEx, HIT_LAUNCH))
ON(cuLaunchCooperativeKernel_result, result(ctx, cuLaunchCooperativeKernel, HIT_LAUNCH))
ON(cuStreamQuery_result, result(ctx, cuStreamQuery, HIT_POLL))
ON(cuEventQuery_result, result(ctx, cuEventQuery, HIT_POLL))
