/* Arrow's default pool, in the preloaded library: `arrow::default_memory_pool()` of any Arrow in the process.
 *
 * Libraries call it by way of their tables of symbols, which ask preloaded libraries first, also for those that were
 * loaded RTLD_LOCAL, as Python's extension modules are. It answers with what src/whole/arrow.rs gives: a pool of the
 * request that is current. Until ctxalloc attaches, and for any Arrow that arrow.rs does not know, it is the caller's
 * own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef void *(*get_pool)(void);
/* The pool for a call of `original` that returns to `caller`; NULL: what `original` returns. */
typedef void *(*decide_pool)(get_pool original, void *caller);

static decide_pool decider;

/* Once, and for ever. */
EXPORT void ctxalloc_whole_attach_arrow(decide_pool pool) { __atomic_store_n(&decider, pool, __ATOMIC_RELEASE); }

/* What a pool's functions return goes through a hidden pointer, whose place in a call arrow.rs knows on x86-64 only. */
#if defined(__x86_64__)

#define NAME "_ZN5arrow19default_memory_poolEv"
EXPORT void *_ZN5arrow19default_memory_poolEv(void);
/* This library's, whoever's the name is resolved to. */
extern void *own_pool(void) __attribute__((alias("_ZN5arrow19default_memory_poolEv"), visibility("hidden")));

/* The function that the caller would have called: that of its own library, or of one that this needs. */
static get_pool find(void *caller) {
    get_pool own = own_pool, found = NULL;
    Dl_info info;
    if (dladdr(caller, &info) && info.dli_fname) {
        void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        if (library) found = (get_pool)dlsym(library, NAME);
    }
    if (!found || found == own) found = (get_pool)dlsym(RTLD_NEXT, NAME);
    if (!found || found == own) {
        static const char text[] = "ctxalloc: arrow::default_memory_pool() was called, but no library defines it\n";
        (void)!write(2, text, sizeof text - 1);
        abort();
    }
    return found;
}

/* Callers that were seen, by their addresses: an entry is written once. What finds no place is looked for again. */
#define CALLERS 1024
#define PROBES 8
static struct {
    void *caller;
    get_pool original;
} seen[CALLERS];
static char being_written;

static get_pool original_of(void *caller) {
    size_t first = ((uintptr_t)caller * 0x9E3779B97F4A7C15u) >> 54;
    for (size_t probe = 0; probe < PROBES; probe++) {
        size_t at = (first + probe) % CALLERS;
        void *there = __atomic_load_n(&seen[at].caller, __ATOMIC_ACQUIRE);
        if (there == caller) return seen[at].original;
        if (there) continue;
        get_pool found = find(caller);
        if (__atomic_compare_exchange_n(&seen[at].caller, &there, (void *)&being_written, 0, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
            seen[at].original = found;
            __atomic_store_n(&seen[at].caller, caller, __ATOMIC_RELEASE);
        }
        return found;
    }
    return find(caller);
}

EXPORT void *_ZN5arrow19default_memory_poolEv(void) {
    void *caller = __builtin_return_address(0);
    get_pool original = original_of(caller);
    decide_pool pool = __atomic_load_n(&decider, __ATOMIC_ACQUIRE);
    void *given = pool ? pool(original, caller) : NULL;
    return given ? given : original();
}

#endif
