// SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause
/* Host evidence of CUDA stream use, added up in the kernel per process and stream.
 *
 * Nothing goes to user space per call: user space reads the whole of `streams` once per interval. Its counters
 * only grow (user space subtracts), so that reading loses nothing. Launches that a capture records into a graph are
 * counted and timed as launches, for the process calls the same function. No kernel structure is dereferenced: any
 * version's headers do. In the words of portable.bpf.h; compiled with
 *   STREAM_ON_STACK   byte offset from the stack pointer, at function entry, of the ninth argument
 *   MAX_STREAMS, MAX_CALLS, MAX_EVENTS, MAX_BINS   bounds of the maps
 */
#include "stream_state.bpf.h"
#include "stream_launches.bpf.h"
#include "stream_copies.bpf.h"
#include "stream_waits.bpf.h"
