/* libctxalloc_whole.so: stands before malloc, for `request(whole=True)`. To be preloaded (LD_PRELOAD).
 *
 * Until ctxalloc attaches it passes every call on to the next allocator, and it needs nothing of Python: children of the
 * process, such as a shell, inherit it. Once attached, each thread counts down the bytes that it asks for. At zero, and
 * for each block of `exact_from` bytes and more, Rust decides (src/whole): it may place the block in a reserved range of
 * addresses, with a record before it. `free` asks only whether an address is in that range, so blocks of other makers
 * cost a comparison.
 *
 * C, since stable Rust has no thread-local of the initial-exec model: any other one may itself call malloc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define EXPORT __attribute__((visibility("default")))

/* What a thread knows. src/whole/shared.rs has the same struct. */
struct thread {
    int64_t left;        /* bytes until the next look; below zero: look now */
    int64_t granted;     /* what `left` was at the last look */
    int64_t sample_left; /* bytes until the next sample */
    uint64_t random;
    void *state;      /* Python's thread state at the last look that asked Python */
    uint64_t version; /* of the running Context at that look */
    uint64_t account; /* the handler that was selected then; 0: no request's */
    uint32_t busy;    /* Rust decides: what it allocates meanwhile is nobody's */
    uint32_t object;  /* the call of malloc under way is for a Python object ... */
    uint32_t resize;  /* ... and one that is resized */
    uint32_t raising; /* the binding's: see src/whole/shared.rs */
    uint64_t refusing; /* these five are Rust's own */
    uint64_t refused_in;
    const void *paused, *held;
    void *nobodys;
    uint32_t changes; /* the binding's */
};

enum { NATIVE, MEM, OBJ, KINDS };
/* MADE: the block is the next allocator's, which has made or resized it. */
enum { DONE, PASS, REFUSED, MADE };
/* How a block is wanted. GROWN: in place of one that is nobody's. */
enum { ZEROED = 1, GROWN = 2 };

struct slow {
    /* `old`: the small block that becomes this one; NULL: none does. */
    void *(*allocate)(struct thread *, uint32_t kind, size_t size, size_t align, uint32_t how, void *old,
                      uint32_t *outcome);
    void *(*resize)(struct thread *, uint32_t kind, void *block, size_t size, uint32_t *outcome);
    void *(*release)(struct thread *, uint32_t kind, void *block); /* returns its twin, which is to be freed */
    void *(*twin)(void *block);                                    /* see `make_twin`; NULL: it has none */
    void (*keep)(struct thread *, void *block, void *twin, size_t room); /* its twin was resized, to this */
    size_t (*usable)(void *block);
    bool (*grows_for_nobody)(struct thread *);
    const size_t *requests; /* how many may be charged blocks */
};

static __thread struct thread self __attribute__((tls_model("initial-exec")));

/* The ranges, one behind the other: where the first begins, where the last ends, and the size of each, which
 * src/whole/range.rs has too. No address is in them until there are any: they begin where no program's addresses are. */
#define RANGE_BITS 38
static uintptr_t base = (uintptr_t)1 << 63, end;
static const struct slow *slow; /* NULL until attached */
static size_t exact_from = SIZE_MAX;

static inline const struct slow *attached(void) { return __atomic_load_n(&slow, __ATOMIC_ACQUIRE); }

/* How many bytes a thread asks for before it looks whether somebody has attached. */
#define UNATTACHED_LOOK (1 << 20)

/* Whether a block may be in a range: one comparison for most, since the ranges are below what programs usually get. */
static inline bool may_be_placed(const void *block) {
    return !LIKELY((uintptr_t)block >= __atomic_load_n(&end, __ATOMIC_RELAXED));
}

/* Which range an address is in: a kind, or a larger number. */
static inline uintptr_t range_of(const void *block) {
    return ((uintptr_t)block - __atomic_load_n(&base, __ATOMIC_RELAXED)) >> RANGE_BITS;
}

/* The next allocator: glibc's, or another one that is preloaded behind this library. */
static void *early_malloc(size_t);
static void *early_calloc(size_t, size_t);
static void *early_realloc(void *, size_t);
static void early_free(void *);
static void *early_memalign(size_t, size_t);
static size_t early_usable(void *);
static struct {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    void (*free)(void *);
    void *(*memalign)(size_t, size_t);
    size_t (*usable)(void *);
} next = {early_malloc, early_calloc, early_realloc, early_free, early_memalign, early_usable};

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static __thread bool finding __attribute__((tls_model("initial-exec")));

/* Finds the next allocator. False while this thread is finding it: `dlsym` itself may allocate. */
static bool find(void) {
    if (finding) return false;
    finding = true;
    void *found[] = {dlsym(RTLD_NEXT, "malloc"),   dlsym(RTLD_NEXT, "calloc"),
                     dlsym(RTLD_NEXT, "realloc"),  dlsym(RTLD_NEXT, "free"),
                     dlsym(RTLD_NEXT, "memalign"), dlsym(RTLD_NEXT, "malloc_usable_size")};
    /* Threads that come here together store the same values. */
#define SET(name, at, otherwise)                                                                                        \
    __atomic_store_n((void **)&next.name, found[at] ? found[at] : (void *)(otherwise), __ATOMIC_RELAXED)
    SET(malloc, 0, __libc_malloc);
    SET(calloc, 1, __libc_calloc);
    SET(realloc, 2, __libc_realloc);
    SET(free, 3, __libc_free);
    SET(memalign, 4, __libc_memalign);
    SET(usable, 5, early_usable);
    finding = false;
    return true;
}

static void *early_malloc(size_t size) { return find() ? next.malloc(size) : __libc_malloc(size); }
static void *early_calloc(size_t n, size_t size) { return find() ? next.calloc(n, size) : __libc_calloc(n, size); }
static void *early_realloc(void *old, size_t size) {
    return find() ? next.realloc(old, size) : __libc_realloc(old, size);
}
static void early_free(void *block) {
    if (find()) next.free(block);
    else __libc_free(block);
}
static void *early_memalign(size_t align, size_t size) {
    return find() ? next.memalign(align, size) : __libc_memalign(align, size);
}
static size_t early_usable(void *block) { return find() && next.usable != early_usable ? next.usable(block) : 0; }

/* Where the loader is. It makes a thread's table of thread-locals by malloc and resizes it by realloc, at the first
 * access to one after libraries were opened. Rust has such thread-locals: asked about the loader's own block, it would have the
 * loader resize the table again, inside of that, and the old one would be freed twice. So these blocks are nobody's. */
static uintptr_t loader, size_of_loader;

static void find_loader(void) {
    const ElfW(Ehdr) *head = (const ElfW(Ehdr) *)_r_debug.r_ldbase;
    if (!head) return;
    const ElfW(Phdr) *part = (const ElfW(Phdr) *)((uintptr_t)head + head->e_phoff);
    for (int n = 0; n < head->e_phnum; n++) {
        uintptr_t end = part[n].p_vaddr + part[n].p_memsz;
        if (part[n].p_type == PT_LOAD && end > size_of_loader) size_of_loader = end;
    }
    loader = (uintptr_t)head;
}

static inline bool is_loaders(const void *caller) { return (uintptr_t)caller - loader < size_of_loader; }

__attribute__((constructor)) static void find_early(void) {
    (void)find();
    find_loader();
}

/* glibc merges the small blocks that were freed into its fast bins when a large one is asked for, and gives the end of a
 * heap back when one is freed. A request's large ones go elsewhere, so glibc is asked for one in their place: once in
 * 16 MiB of a request's small blocks, and where a large one is freed after 1 MiB of them. Until then it has what was
 * freed for blocks of the same sizes, and it merges them before it takes more from the system. */
#define LARGE_FOR_GLIBC (64 << 10)
enum { SAMPLES_TO_MERGE = 512, SAMPLES_TO_LARGE = 32 }; /* each stands for some 32 KiB */
static __thread uint32_t samples __attribute__((tls_model("initial-exec")));

static __attribute__((noinline)) void merge(void) {
    int saved = errno;
    samples = 0;
    next.free(next.malloc(LARGE_FOR_GLIBC));
    errno = saved;
}

/* Rust decides about a block. NULL with PASS: it goes to the next allocator. Most do while no request is selected, so
 * nothing is done for these that others alone need: Rust keeps errno. */
static __attribute__((noinline)) void *decide(uint32_t kind, size_t size, size_t align, uint32_t how, void *old,
                                              uint32_t *outcome) {
    const struct slow *decider = attached();
    *outcome = PASS;
    if (!decider) {
        self.left = UNATTACHED_LOOK;
        return NULL;
    }
    void *block = decider->allocate(&self, kind, size, align, how, old, outcome);
    if (LIKELY(!block)) {
        if (*outcome == REFUSED) errno = ENOMEM;
        return NULL;
    }
    bool is_sample = kind == NATIVE && size < __atomic_load_n(&exact_from, __ATOMIC_RELAXED);
    if (is_sample && ++samples == SAMPLES_TO_MERGE) merge();
    return block;
}

/* Whether Rust is to look at a block of native memory. What is counted down is close to what glibc takes for it. */
static inline bool is_due(size_t size) {
    if (size >= __atomic_load_n(&exact_from, __ATOMIC_RELAXED)) return true;
    self.left -= (int64_t)size + 8;
    return self.left < 0;
}

/* Whether Python's own allocator is asked whose a block is, and what is known so far: see `shrinks`. */
enum { NOT_ASKED, ASKED, ITS_OWN, OF_MALLOC };
static __thread uint32_t asked __attribute__((tls_model("initial-exec")));

static __attribute__((noinline)) void *malloc_slowly(size_t size, bool zeroed, const void *caller) {
    if (asked) {
        asked = ITS_OWN;
        return NULL;
    }
    uint32_t outcome = PASS;
    void *block = is_loaders(caller) ? NULL : decide(NATIVE, size, 16, zeroed ? ZEROED : 0, NULL, &outcome);
    if (outcome != PASS) return block;
    return zeroed ? next.calloc(1, size) : next.malloc(size);
}

EXPORT void *malloc(size_t size) {
    if (LIKELY(!is_due(size))) return next.malloc(size);
    return malloc_slowly(size, false, __builtin_return_address(0));
}

EXPORT void *calloc(size_t count, size_t each) {
    size_t size;
    if (__builtin_mul_overflow(count, each, &size)) {
        errno = ENOMEM;
        return NULL;
    }
    if (LIKELY(!is_due(size))) return next.calloc(count, each);
    return malloc_slowly(size, true, __builtin_return_address(0));
}

/* Python's domains MEM and OBJ. The struct is CPython's PyMemAllocatorEx, unchanged since 3.5. */
struct allocator {
    void *ctx;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
};

static struct allocator original[KINDS];

/* Of an aligned block that is decided about: how much more its alignment makes of it than was asked for. The next
 * allocator is asked for just what others ask for: mimalloc 2.0 has places for some sizes that are not aligned. */
static __thread size_t rest_of_aligned __attribute__((tls_model("initial-exec")));

/* A sample has a twin: the block that the next allocator, or Python's own, would have in its place. Nobody uses it, but
 * it is resized and freed with the sample. So a sample has room where others have room, lies as others do within
 * 32 KiB, which caches by address ask for (src/whole/samples.rs), and leaves to others the places that they had
 * without it. Of `old`, if there is one, which may move. */
static void *make_twin(uint32_t kind, void *old, size_t size, size_t align, size_t *room) {
    if (kind == NATIVE) {
        void *twin = old ? next.realloc(old, size)
                   : align > 16 ? next.memalign(align, size - rest_of_aligned)
                                : next.malloc(size);
        *room = twin ? next.usable(twin) : 0;
        return twin;
    }
    const struct allocator *own = &original[kind];
    *room = size;
    return old ? own->realloc(own->ctx, old, size) : own->malloc(own->ctx, size);
}

static inline void *twin_of(void *block) { return attached()->twin(block); }

static __attribute__((noinline)) void free_placed(int kind, void *block) {
    int saved = errno;
    const struct slow *decider = attached();
    bool is_large = samples >= SAMPLES_TO_LARGE && decider->usable(block) >= LARGE_FOR_GLIBC;
    void *twin = decider->release(&self, kind, block);
    errno = saved;
    if (twin && kind == NATIVE) next.free(twin);
    else if (twin) original[kind].free(original[kind].ctx, twin);
    if (is_large) merge();
}

/* Which range a block is in; KINDS: none. A block of Python's gets here too where a tool has put Python's own allocator
 * back, and our hooks are gone: that passes on what it does not know. */
static inline int kind_of_placed(const void *block) {
    uintptr_t range = range_of(block);
    return LIKELY(range >= KINDS) ? KINDS : (int)range;
}

/* Python's domain RAW, where the other two are its allocator of small objects: that gives a block which it does not
 * know to this one, whose `free` is ours. So nothing stands before its own. */
static struct allocator raw;

static inline bool frees_by_raw(void) { return raw.free != NULL; }

/* What is larger goes from Python's allocator to malloc, which decides about it. */
#define SMALL_OBJECT 512

/* Python counts a sample as one that it had made there, and its twin, too (sys.getallocatedblocks): one more is made. */
static void count_raw(const struct allocator *own) {
    int64_t left = self.left;
    self.left = INT64_MAX; /* it is nobody's, and in no number */
    void *block = own->malloc(own->ctx, SMALL_OBJECT + 1);
    if (block) raw.free(raw.ctx, block);
    self.left = left;
}

static __attribute__((noinline)) void free_low(void *block) {
    int kind = kind_of_placed(block);
    if (kind == KINDS) {
        next.free(block);
        return;
    }
    free_placed(kind, block);
    if (kind != NATIVE && frees_by_raw()) count_raw(&original[kind]);
}

EXPORT void free(void *block) {
    if (may_be_placed(block)) free_low(block);
    else next.free(block);
}

/* Whether the next allocator has a block of no bytes where one is resized to none: mimalloc has, glibc frees it. */
static bool resizes_to_nothing;

/* PASS: its request has ended, and the caller is to make a new one, for `replace_placed`. */
static void *resize_placed(int kind, void *block, size_t size, uint32_t *outcome) {
    *outcome = DONE;
    if (size == 0) {
        void *nothing = resizes_to_nothing ? next.malloc(0) : NULL;
        if (nothing || !resizes_to_nothing) free_placed(kind, block);
        return nothing;
    }
    int saved = errno;
    void *moved = attached()->resize(&self, kind, block, size, outcome);
    errno = *outcome == REFUSED ? ENOMEM : saved;
    return moved;
}

/* Copies what is in a placed block to one of so many bytes that comes in its place; false: there is none. */
static bool copy_placed(void *other, const void *block, size_t size) {
    if (!other) return false;
    size_t usable = attached()->usable((void *)block);
    memcpy(other, block, usable < size ? usable : size);
    return true;
}

static __attribute__((noinline)) void *replace_placed(int kind, void *block, void *other, size_t size) {
    if (copy_placed(other, block, size)) free_placed(kind, block);
    return other;
}

/* The same for a sample whose twin became the other one. */
static void *replace_sample(int kind, void *block, void *other, size_t size) {
    int saved = errno;
    if (copy_placed(other, block, size)) (void)attached()->release(&self, kind, block);
    errno = saved;
    return other;
}

static __attribute__((noinline)) void *realloc_slowly(void *old, size_t old_size, size_t size, uint32_t how,
                                                      const void *caller) {
    uint32_t outcome = PASS;
    bool is_small = size < __atomic_load_n(&exact_from, __ATOMIC_RELAXED);
    void *block = is_loaders(caller) ? NULL : decide(NATIVE, size, 16, how, is_small ? old : NULL, &outcome);
    if (outcome == PASS) return next.realloc(old, size);
    if (outcome != DONE) return block;
    void *twin = is_small ? twin_of(block) : NULL;
    memcpy(block, twin ? twin : old, old_size < size ? old_size : size);
    if (!twin) next.free(old);
    return block;
}

/* A sample is resized as its twin is: it is none any more, unless it is drawn again, or the twin has room for it. */
static void *resize_sample(void *old, void *twin, size_t size) {
    if (size > next.usable(twin)) return replace_sample(NATIVE, old, realloc(twin, size), size);
    void *resized = next.realloc(twin, size);
    if (!resized) resized = twin;
    attached()->keep(&self, old, resized, next.usable(resized));
    return old;
}

/* How much more than was asked for a block may have: glibc rounds up to its unit of 16, and leaves it a rest that is
 * too small for a block. So one with a little more than `exact_from` may have been small, and its growth is charged. */
#define SPARE 32

EXPORT void *realloc(void *old, size_t size) {
    if (!old) return malloc(size);
    int kind = kind_of_placed(old);
    if (kind != KINDS) {
        uint32_t outcome;
        void *twin = size && kind == NATIVE ? twin_of(old) : NULL;
        if (twin) return resize_sample(old, twin, size);
        void *moved = resize_placed(kind, old, size, &outcome);
        if (outcome != PASS) return moved;
        moved = replace_placed(kind, old, malloc(size), size);
        if (moved && kind != NATIVE && frees_by_raw()) count_raw(&original[kind]);
        return moved;
    }
    size_t exact = __atomic_load_n(&exact_from, __ATOMIC_ACQUIRE);
    if (exact == SIZE_MAX || size == 0) return next.realloc(old, size); /* nobody has attached */
    /* A large block that is not placed is nobody's until a request lets it grow, which then pays for it. A small one is
     * drawn as it grows as a new one is: src/whole/resize.rs. */
    size_t old_size = next.usable(old);
    if (size <= old_size) return next.realloc(old, size);
    if (size == PTRDIFF_MAX && asked) {
        asked = OF_MALLOC;
        return NULL;
    }
    if (old_size >= exact + SPARE) {
        const struct slow *decider = __atomic_load_n(&slow, __ATOMIC_RELAXED);
        const void *caller = __builtin_return_address(0);
        if (!__atomic_load_n(decider->requests, __ATOMIC_RELAXED) || is_loaders(caller) ||
            LIKELY(decider->grows_for_nobody(&self)))
            return next.realloc(old, size);
        return realloc_slowly(old, old_size, size, GROWN, caller);
    }
    if (LIKELY(!is_due(size))) return next.realloc(old, size);
    return realloc_slowly(old, old_size, size, 0, __builtin_return_address(0));
}

EXPORT void *reallocarray(void *old, size_t count, size_t each) {
    size_t size;
    if (__builtin_mul_overflow(count, each, &size)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(old, size);
}

/* Whether the next allocator has a multiple of its alignment for an aligned block: glibc has not. */
static bool rounds_to_alignment;

EXPORT void *memalign(size_t align, size_t size) {
    /* What is no power of two is the next allocator's to judge. */
    if (align == 0 || (align & (align - 1))) return next.memalign(align, size);
    size_t exact = __atomic_load_n(&exact_from, __ATOMIC_RELAXED);
    size_t rest = rounds_to_alignment && size < exact ? -size & (align - 1) : 0;
    if (LIKELY(!is_due(size + rest))) return next.memalign(align, size);
    uint32_t outcome;
    rest_of_aligned = rest;
    void *block = decide(NATIVE, size + rest, align, 0, NULL, &outcome);
    rest_of_aligned = 0;
    return outcome == PASS ? next.memalign(align, size) : block;
}

/* Asked for nothing, jemalloc's `memalign` does not align, and its other two do. */
EXPORT int posix_memalign(void **place, size_t align, size_t size) {
    if (align < sizeof(void *) || (align & (align - 1))) return EINVAL;
    int saved = errno;
    void *block = memalign(align, size ? size : 1);
    errno = saved;
    if (!block) return ENOMEM;
    *place = block;
    return 0;
}

EXPORT void *aligned_alloc(size_t align, size_t size) { return memalign(align, size ? size : 1); }

static size_t page(void) {
    extern int getpagesize(void);
    return (size_t)getpagesize();
}

EXPORT void *valloc(size_t size) { return memalign(page(), size); }

EXPORT void *pvalloc(size_t size) {
    size_t unit = page(), rounded;
    if (__builtin_add_overflow(size, unit - 1, &rounded)) {
        errno = ENOMEM;
        return NULL;
    }
    return memalign(unit, rounded & ~(unit - 1));
}

EXPORT size_t malloc_usable_size(void *block) {
    if (kind_of_placed(block) != KINDS) return attached()->usable(block);
    return next.usable(block);
}

static __attribute__((noinline)) void *object_slowly(int kind, size_t size, bool zeroed) {
    const struct allocator *own = &original[kind];
    if (size <= SMALL_OBJECT) {
        uint32_t outcome;
        void *block = decide(kind, size, 16, zeroed ? ZEROED : 0, NULL, &outcome);
        if (outcome != PASS) return block;
        return zeroed ? own->calloc(own->ctx, 1, size) : own->malloc(own->ctx, size);
    }
    uint32_t before = self.object;
    self.object = 1;
    void *block = zeroed ? own->calloc(own->ctx, 1, size) : own->malloc(own->ctx, size);
    self.object = before;
    return block;
}

/* A new one. */
static inline void *object_made(int kind, void *ctx, size_t size) {
    if (LIKELY(size <= SMALL_OBJECT) && LIKELY((self.left -= (int64_t)size) >= 0))
        return original[kind].malloc(ctx, size);
    return object_slowly(kind, size, false);
}

static __attribute__((noinline)) void *large_object_resized(int kind, void *old, size_t size) {
    const struct allocator *own = &original[kind];
    uint32_t object = self.object, resize = self.resize;
    self.object = self.resize = 1;
    void *block = own->realloc(own->ctx, old, size);
    self.object = object;
    self.resize = resize;
    return block;
}

/* Where Python's allocator of small objects has the number of a block's size, in steps of 16: in the head of the pool
 * that the block is in, which begins at a multiple of 16 KiB, in each CPython since 3.10. False: not in this one. */
#define POOL (16 << 10)
#define NUMBER_OF_SIZE 36
static bool knows_sizes[KINDS];

static inline uint32_t number_of_size(const void *block) {
    return *(const uint32_t *)(((uintptr_t)block & -(uintptr_t)POOL) + NUMBER_OF_SIZE);
}

static bool learn_sizes(const struct allocator *own) {
    bool is_so = true;
    for (size_t size = 16; is_so && size <= SMALL_OBJECT; size += 16) {
        void *block = own->malloc(own->ctx, size);
        unsigned char resident;
        bool is_there = block && mincore((void *)((uintptr_t)block & -(uintptr_t)POOL), 1, &resident) == 0;
        is_so = is_there && number_of_size(block) == size / 16 - 1;
        own->free(own->ctx, block);
    }
    return is_so;
}

/* Whether a block of Python's that is not placed has so many bytes, so far as can be told. Whose it is, its allocator
 * tells by what it calls when it is to make it larger than anything: malloc, or for a block of malloc's realloc. Both
 * have nothing for it, so the block stays as it is. */
static bool shrinks(uint32_t kind, void *old, size_t size) {
    const struct allocator *own = &original[kind];
    int saved = errno;
    asked = ASKED;
    (void)own->realloc(own->ctx, old, PTRDIFF_MAX);
    uint32_t answer = asked;
    asked = NOT_ASKED;
    errno = saved;
    if (answer == OF_MALLOC) return size <= next.usable(old);
    return answer == ITS_OWN && knows_sizes[kind] && size <= (number_of_size(old) + 1) * 16;
}

static __attribute__((noinline)) void *small_object_resized(int kind, void *old, size_t size) {
    const struct allocator *own = &original[kind];
    uint32_t outcome;
    void *block = decide(kind, size, 16, 0, old, &outcome);
    if (outcome == PASS) return own->realloc(own->ctx, old, size);
    if (outcome == DONE) memcpy(block, twin_of(block), size);
    return block;
}

/* A small one is drawn each time as a new one is: src/whole/resize.rs. */
static void *object_resized(int kind, void *old, size_t size) {
    if (!LIKELY(size <= SMALL_OBJECT)) return large_object_resized(kind, old, size);
    if (LIKELY((self.left -= (int64_t)size) >= 0)) return original[kind].realloc(original[kind].ctx, old, size);
    return small_object_resized(kind, old, size);
}

/* One that may be placed. A sample is resized as its twin is. */
static __attribute__((noinline)) void *low_object_resized(int kind, void *old, size_t size) {
    uintptr_t range = range_of(old);
    if (range != NATIVE && range != (uintptr_t)kind) return object_resized(kind, old, size);
    if (range == NATIVE && size > SMALL_OBJECT) return large_object_resized(kind, old, size);
    void *twin = twin_of(old);
    if (!twin) return large_object_resized(kind, old, size);
    return replace_sample((int)range, old, object_resized(kind, twin, size), size);
}

static __attribute__((noinline)) void low_object_freed(int kind, void *block) {
    if (range_of(block) != (uintptr_t)kind) original[kind].free(original[kind].ctx, block);
    else free_placed(kind, block);
}

/* Functions of their own for each domain, whose number the compiler then knows: these are called for every object.
 * Their `ctx` is that of Python's own, which they pass on. */
#define HOOKS(domain, kind)                                                                                             \
    static void *domain##_malloc(void *ctx, size_t size) {                                                              \
        return object_made(kind, ctx, size);                                                                            \
    }                                                                                                                   \
    static void *domain##_calloc(void *ctx, size_t count, size_t each) {                                                \
        size_t size;                                                                                                    \
        if (__builtin_mul_overflow(count, each, &size)) return NULL;                                                    \
        if (LIKELY(size <= SMALL_OBJECT) && LIKELY((self.left -= (int64_t)size) >= 0))                                  \
            return original[kind].calloc(ctx, count, each);                                                             \
        return object_slowly(kind, size, true);                                                                         \
    }                                                                                                                   \
    static void *domain##_realloc(void *ctx, void *old, size_t size) {                                                  \
        if (!old) return domain##_malloc(ctx, size);                                                                    \
        return may_be_placed(old) ? low_object_resized(kind, old, size) : object_resized(kind, old, size);              \
    }                                                                                                                   \
    static void domain##_free(void *ctx, void *block) {                                                                 \
        if (may_be_placed(block)) low_object_freed(kind, block);                                                        \
        else original[kind].free(ctx, block);                                                                           \
    }
HOOKS(mem, MEM)
HOOKS(obj, OBJ)

/* The functions that Python is to call for this domain in place of `own`. `raws`: see `raw`; NULL where `own` is
 * another allocator than Python's of small objects. */
EXPORT void ctxalloc_whole_hook(uint32_t kind, const struct allocator *own, const struct allocator *raws,
                                struct allocator *hook) {
    original[kind] = *own;
    if (raws) raw = *raws;
    *hook = kind == MEM ? (struct allocator){own->ctx, mem_malloc, mem_calloc, mem_realloc, mem_free}
                        : (struct allocator){own->ctx, obj_malloc, obj_calloc, obj_realloc, obj_free};
    if (raws) hook->free = own->free;
    if (raws) knows_sizes[kind] = learn_sizes(own);
}

EXPORT void *ctxalloc_whole_twin(uint32_t kind, void *old, size_t size, size_t align, size_t *room) {
    return make_twin(kind, old, size, align, room);
}

EXPORT bool ctxalloc_whole_shrinks(uint32_t kind, void *old, size_t size) { return shrinks(kind, old, size); }

/* The number of the agreement between this library and src/whole. */
#define VERSION 11

EXPORT uint32_t ctxalloc_whole_version(void) { return VERSION; }

/* A function of the next allocator. */
EXPORT const void *ctxalloc_whole_next(void) { return (const void *)next.malloc; }

/* This thread's. */
EXPORT struct thread *ctxalloc_whole_thread(void) { return &self; }

/* This library's, whoever's the name is resolved to: for first.c. */
extern __typeof(malloc) own_malloc __attribute__((alias("malloc"), visibility("hidden")));

/* In bytes; as in a program of any size. */
#define KEPT_BY_GLIBC (2 << 20)

/* Once, and for ever: a placed block may live as long as the process. */
EXPORT void ctxalloc_whole_attach(uintptr_t first, size_t exact, const struct slow *decider) {
    /* Of the end of its heap glibc keeps twice the largest block that it mapped and got back (mallopt(3)). A request's
     * go elsewhere from now on, and what lies there would go to the system with each document and come anew. */
    next.free(next.malloc(KEPT_BY_GLIBC / 2));
    void *aligned = next.memalign(page(), 1);
    rounds_to_alignment = aligned && next.usable(aligned) >= page() / 2;
    next.free(aligned);
    void *nothing = next.realloc(next.malloc(1), 0);
    resizes_to_nothing = nothing != NULL;
    next.free(nothing);
    __atomic_store_n(&base, first, __ATOMIC_RELAXED);
    __atomic_store_n(&end, first + ((uintptr_t)KINDS << RANGE_BITS), __ATOMIC_RELAXED);
    __atomic_store_n(&slow, decider, __ATOMIC_RELEASE);
    __atomic_store_n(&exact_from, exact, __ATOMIC_RELEASE);
    self.left = 0;
}

