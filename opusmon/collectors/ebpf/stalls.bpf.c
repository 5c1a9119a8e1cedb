// SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause
/* What keeps threads that feed a GPU from doing so: single events into a ring, frequent ones added up per thread.
 *
 * Nothing goes to user space per launch. Threads are watched once they have called libcuda; `watched` (processes that
 * map it, and those whose TLS is looked at) and `control` are filled by user space. Compiled with
 *   STREAM_ON_STACK   byte offset from the stack pointer, at function entry, of the ninth argument
 *   SYSCALL_AT        byte offset in the kernel's pt_regs of the number of the system call
 *   SYSCALL_FUTEX     its number
 *   RING_PAGES, MAX_THREADS, MAX_CALLS, MAX_PROCESSES, MAX_STACKS   bounds of the maps
 */
#include "stall_state.bpf.h"
#include "stall_calls.bpf.h"
#include "stall_captures.bpf.h"
#include "stall_entries.bpf.h"
#include "stall_threads.bpf.h"
#include "stall_tls.bpf.h"
