/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* One C source for two backends: bcc, which compiles it on the host, and clang, which compiled it before, for libbpf.
 *
 * NAME.bpf.c, or the first of its parts, begins with
 *     #include "portable.bpf.h"
 * and uses the words below instead of either dialect. Its parts are headers beside it, put into one text before any
 * compiler sees it (source_text.py). Python loads it with `probes.load("NAME", cflags)`, where
 * cflags are the -D words of its bounds; the objects are made by `python tests/bpf_objects.py`, which holds a table
 * of the sources and their flags per machine.
 *
 * Rules that keep one source good for both:
 *   - The first argument of a MAP_, RING_ or STACK_ word is the bare name of the map, on the same line as the word;
 *     keys and values are passed by address of a variable on the stack (or a pointer from another map). These words
 *     stand in functions, never in a macro of yours, nor inside the arguments of one another. (bcc takes no map
 *     inside a macro, so for bcc they are replaced in the text before it is compiled: see bcc_text.py.)
 *   - No kernel structure is dereferenced: arguments are read from `ctx`, user memory with bpf_probe_read_user() and
 *     its result is checked. Then the headers' version does not matter and no relocation is needed. Kernel >= 5.8.
 *   - No globals, static or not, and no string literals (they would land in .rodata): bounds are macros. Structures
 *     are zeroed before they become a key or go into a map or ring, padding included (name it: `u32 pad`).
 *   - No printk, no function calls but `static __always_inline`, no loops but those with a constant bound and
 *     `#pragma unroll`.
 *
 * Types     u8 u16 u32 u64 s32 s64; struct pt_regs with PT_REGS_PARM1..6, PT_REGS_SP, PT_REGS_RC, PT_REGS_IP.
 *
 * Maps      HASH_MAP(name, key type, value type, entries);       LRU_HASH_MAP(name, key type, value type, entries);
 *           ARRAY_MAP(name, value type, entries);                PERCPU_ARRAY_MAP(name, value type, entries);
 *           RING_MAP(name, pages);      4096-byte pages of data, a power of two
 *           STACK_MAP(name, entries);   stack traces, up to 127 frames each
 *
 * On them   value *p = MAP_LOOKUP(map, &key);                    0 when there is none
 *           long bad = MAP_UPDATE(map, &key, &value);            insert or replace
 *           long bad = MAP_INSERT(map, &key, &value);            only where there is none
 *           MAP_DELETE(map, &key);
 *           struct x_t *e = RING_RESERVE(ring, struct x_t);      0 when full: count that; fill all of it
 *           RING_SUBMIT(ring, e, flags);                         flags: 0, or BPF_RB_NO_WAKEUP
 *           RING_DISCARD(ring, e, BPF_RB_NO_WAKEUP);
 *           long id = STACK_ID(map, ctx, BPF_F_USER_STACK | BPF_F_REUSE_STACKID);      negative: none
 *
 * Programs  UPROBE int name(struct pt_regs *ctx) { ... return 0; }          at entry or return, Backend.attach()
 *           TRACEPOINT int name(struct args_t *ctx) { ... return 0; }       Backend.attach_tracepoint(); args_t is your
 *               own: the event's format in tracefs, with the 8 bytes of common fields first
 *
 * Helpers keep their names in both: bpf_ktime_get_ns, bpf_get_current_pid_tgid, bpf_get_current_comm,
 * bpf_probe_read_user, bpf_probe_read_user_str, bpf_get_smp_processor_id, bpf_get_current_cgroup_id. Atomic addition is
 * __sync_fetch_and_add(p, n), its result unused (older kernels know no other).
 */
#pragma once

#ifdef BPF_HASH /* bcc reads its own words before this text */

#define BPF_LICENSE Dual BSD/GPL
#include <uapi/linux/ptrace.h>

#define HASH_MAP(name, key, value, entries) BPF_HASH(name, key, value, entries)
#define LRU_HASH_MAP(name, key, value, entries) BPF_TABLE("lru_hash", key, value, name, entries)
#define ARRAY_MAP(name, value, entries) BPF_ARRAY(name, value, entries)
#define PERCPU_ARRAY_MAP(name, value, entries) BPF_PERCPU_ARRAY(name, value, entries)
#define RING_MAP(name, pages) BPF_RINGBUF_OUTPUT(name, pages)
#define STACK_MAP(name, entries) BPF_STACK_TRACE(name, entries)

/* MAP_LOOKUP(map, key) and the like: bcc takes no map inside a macro, so bcc_text.py writes map.lookup(key) instead. */

#define UPROBE
#define TRACEPOINT

#else /* clang, for libbpf: needs linux-libc-dev and libbpf-dev where it is compiled, nothing where it is loaded */

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Registers as the kernel lays them out for BPF programs: part of its stable interface, one layout per machine. */
#if defined(MACHINE_x86_64)

struct pt_regs {
    u64 r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#define PT_REGS_PARM1(x) ((x)->di)
#define PT_REGS_PARM2(x) ((x)->si)
#define PT_REGS_PARM3(x) ((x)->dx)
#define PT_REGS_PARM4(x) ((x)->cx)
#define PT_REGS_PARM5(x) ((x)->r8)
#define PT_REGS_PARM6(x) ((x)->r9)
#define PT_REGS_RC(x) ((x)->ax)
#define PT_REGS_SP(x) ((x)->sp)
#define PT_REGS_IP(x) ((x)->ip)

#elif defined(MACHINE_aarch64)

struct pt_regs {
    u64 regs[31], sp, pc, pstate;
};
#define PT_REGS_PARM1(x) ((x)->regs[0])
#define PT_REGS_PARM2(x) ((x)->regs[1])
#define PT_REGS_PARM3(x) ((x)->regs[2])
#define PT_REGS_PARM4(x) ((x)->regs[3])
#define PT_REGS_PARM5(x) ((x)->regs[4])
#define PT_REGS_PARM6(x) ((x)->regs[5])
#define PT_REGS_RC(x) ((x)->regs[0])
#define PT_REGS_SP(x) ((x)->sp)
#define PT_REGS_IP(x) ((x)->pc)

#else
#error "compile with -DMACHINE_x86_64 or -DMACHINE_aarch64"
#endif

#define MAP_OF(name, kind, key_type, value_type, entries)                                                              \
    struct {                                                                                                           \
        __uint(type, kind);                                                                                            \
        __uint(max_entries, entries);                                                                                  \
        __type(key, key_type);                                                                                         \
        __type(value, value_type);                                                                                     \
    } name SEC(".maps")
#define HASH_MAP(name, key, value, entries) MAP_OF(name, BPF_MAP_TYPE_HASH, key, value, entries)
#define LRU_HASH_MAP(name, key, value, entries) MAP_OF(name, BPF_MAP_TYPE_LRU_HASH, key, value, entries)
#define ARRAY_MAP(name, value, entries) MAP_OF(name, BPF_MAP_TYPE_ARRAY, u32, value, entries)
#define PERCPU_ARRAY_MAP(name, value, entries) MAP_OF(name, BPF_MAP_TYPE_PERCPU_ARRAY, u32, value, entries)
#define RING_MAP(name, pages)                                                                                          \
    struct {                                                                                                           \
        __uint(type, BPF_MAP_TYPE_RINGBUF);                                                                            \
        __uint(max_entries, (pages) * 4096);                                                                           \
    } name SEC(".maps")
#define STACK_MAP(name, entries)                                                                                       \
    struct {                                                                                                           \
        __uint(type, BPF_MAP_TYPE_STACK_TRACE);                                                                        \
        __uint(max_entries, entries);                                                                                  \
        __uint(key_size, 4);                                                                                           \
        __uint(value_size, 127 * 8);                                                                                   \
    } name SEC(".maps")

#define MAP_LOOKUP(map, key) bpf_map_lookup_elem(&map, key)
#define MAP_UPDATE(map, key, value) bpf_map_update_elem(&map, key, value, BPF_ANY)
#define MAP_INSERT(map, key, value) bpf_map_update_elem(&map, key, value, BPF_NOEXIST)
#define MAP_DELETE(map, key) bpf_map_delete_elem(&map, key)
#define RING_RESERVE(map, type) bpf_ringbuf_reserve(&map, sizeof(type), 0)
#define RING_SUBMIT(map, entry, flags) bpf_ringbuf_submit(entry, flags)
#define RING_DISCARD(map, entry, flags) bpf_ringbuf_discard(entry, flags)
#define STACK_ID(map, ctx, flags) bpf_get_stackid(ctx, &map, flags)

#define UPROBE SEC("uprobe")
#define TRACEPOINT SEC("tracepoint")

#endif
