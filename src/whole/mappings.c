/* mmap and its kin, in the preloaded library, for who chooses that anonymous mappings of libraries count. Until then, and
 * for all others, each is the system's own call.
 *
 * The system is called directly: a next allocator maps memory as it begins, and to look for another `mmap` may ask it for
 * some. What glibc maps itself, for malloc and for threads' stacks, does not come here. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

struct thread;
extern struct thread *ctxalloc_whole_thread(void);

/* src/whole/mappings.rs has the same struct. */
struct mappings {
    /* There is memory here now, from `old_size` on, for whoever is to get this returned to. */
    void (*mapped)(struct thread *, uintptr_t start, size_t old_size, size_t size, const void *caller);
    /* The system is asked to change what is here; returns what `settle` is told; 0: nothing is in an account. */
    size_t (*lift)(struct thread *, uintptr_t start, size_t size);
    /* Of what was lifted at `from`, so many bytes are at `to` now, and the others are no more. */
    void (*settle)(struct thread *, size_t lifted, uintptr_t from, uintptr_t to, size_t kept);
};

static const struct mappings *mappings; /* NULL: nobody chose it */

/* Once, and for ever. */
EXPORT void ctxalloc_whole_attach_mappings(const struct mappings *ours) {
    __atomic_store_n(&mappings, ours, __ATOMIC_RELEASE);
}

static inline const struct mappings *chosen(void) { return __atomic_load_n(&mappings, __ATOMIC_ACQUIRE); }

/* Memory that is a program's as it is mapped. What may not be written to, or is mapped without swap behind it, is an
 * address that somebody reserves. */
static bool is_memory(int protection, int flags) {
    return (flags & MAP_ANONYMOUS) && !(flags & MAP_NORESERVE) && (protection & PROT_WRITE) && !(protection & PROT_EXEC);
}

/* What the system is asked to change is lifted before: afterwards another thread may have the same addresses. */
static size_t lift(const struct mappings *ours, uintptr_t start, size_t size) {
    if (!ours) return 0;
    int saved = errno;
    size_t lifted = ours->lift(ctxalloc_whole_thread(), start, size);
    errno = saved;
    return lifted;
}

static void settle(size_t lifted, uintptr_t from, uintptr_t to, size_t kept) {
    if (!lifted) return;
    int saved = errno;
    chosen()->settle(ctxalloc_whole_thread(), lifted, from, to, kept);
    errno = saved;
}

static void tell_mapped(void *start, size_t old_size, size_t size, const void *caller) {
    int saved = errno;
    chosen()->mapped(ctxalloc_whole_thread(), (uintptr_t)start, old_size, size, caller);
    errno = saved;
}

EXPORT void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    const struct mappings *ours = chosen();
    uintptr_t place = (uintptr_t)at;
    size_t replaced = flags & MAP_FIXED ? lift(ours, place, size) : 0;
    void *start = (void *)syscall(SYS_mmap, at, size, protection, flags, file, offset);
    settle(replaced, place, place, start == MAP_FAILED ? size : 0);
    if (ours && start != MAP_FAILED && is_memory(protection, flags))
        tell_mapped(start, 0, size, __builtin_return_address(0));
    return start;
}

extern __typeof(mmap) mmap64 __attribute__((alias("mmap"), visibility("default")));

EXPORT int munmap(void *start, size_t size) {
    uintptr_t place = (uintptr_t)start;
    size_t lifted = lift(chosen(), place, size);
    int failed = (int)syscall(SYS_munmap, start, size);
    settle(lifted, place, place, failed ? size : 0);
    return failed;
}

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

EXPORT void *mremap(void *old, size_t old_size, size_t size, int flags, ...) {
    const struct mappings *ours = chosen();
    va_list more;
    va_start(more, flags);
    void *at = flags & (MREMAP_FIXED | MREMAP_DONTUNMAP) ? va_arg(more, void *) : NULL;
    va_end(more);
    uintptr_t from = (uintptr_t)old, place = (uintptr_t)at;
    size_t replaced = flags & MREMAP_FIXED ? lift(ours, place, size) : 0;
    size_t lifted = lift(ours, from, old_size);
    void *moved = (void *)syscall(SYS_mremap, old, old_size, size, flags, at);
    bool failed = moved == MAP_FAILED, stays = failed || (flags & MREMAP_DONTUNMAP);
    settle(replaced, place, place, failed ? size : 0);
    settle(lifted, from, stays ? from : (uintptr_t)moved, stays || old_size < size ? old_size : size);
    size_t had = flags & MREMAP_DONTUNMAP ? 0 : old_size;
    if (lifted && !failed && size > had) tell_mapped(moved, had, size, __builtin_return_address(0));
    return moved;
}
