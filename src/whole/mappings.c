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
    /* There is memory here now, for whoever is to get this returned to. */
    void (*mapped)(struct thread *, uintptr_t start, size_t size, const void *caller);
    /* There will be none. */
    void (*unmapped)(struct thread *, uintptr_t start, size_t size);
    /* It will be moved or resized; returns what `settle` is told; 0: it is in no account. */
    size_t (*lift)(struct thread *, uintptr_t start, size_t size);
    void (*settle)(struct thread *, size_t lifted, uintptr_t start, size_t size, size_t old_size);
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

EXPORT void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    const struct mappings *ours = chosen();
    int saved = errno;
    if (ours && (flags & MAP_FIXED)) ours->unmapped(ctxalloc_whole_thread(), (uintptr_t)at, size);
    errno = saved;
    void *start = (void *)syscall(SYS_mmap, at, size, protection, flags, file, offset);
    if (!ours || start == MAP_FAILED || !is_memory(protection, flags)) return start;
    ours->mapped(ctxalloc_whole_thread(), (uintptr_t)start, size, __builtin_return_address(0));
    errno = saved;
    return start;
}

extern __typeof(mmap) mmap64 __attribute__((alias("mmap"), visibility("default")));

/* Before it is done: afterwards another thread may have the same addresses. */
EXPORT int munmap(void *start, size_t size) {
    const struct mappings *ours = chosen();
    int saved = errno;
    if (ours) ours->unmapped(ctxalloc_whole_thread(), (uintptr_t)start, size);
    errno = saved;
    return (int)syscall(SYS_munmap, start, size);
}

EXPORT void *mremap(void *old, size_t old_size, size_t size, int flags, ...) {
    const struct mappings *ours = chosen();
    va_list more;
    va_start(more, flags);
    void *at = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
    va_end(more);
    int saved = errno;
    if (ours && at) ours->unmapped(ctxalloc_whole_thread(), (uintptr_t)at, size);
    size_t lifted = ours ? ours->lift(ctxalloc_whole_thread(), (uintptr_t)old, old_size) : 0;
    errno = saved;
    void *moved = (void *)syscall(SYS_mremap, old, old_size, size, flags, at);
    if (!lifted) return moved;
    saved = errno;
    bool is_done = moved != MAP_FAILED;
    ours->settle(ctxalloc_whole_thread(), lifted, (uintptr_t)(is_done ? moved : old), is_done ? size : old_size, old_size);
    errno = saved;
    return moved;
}
