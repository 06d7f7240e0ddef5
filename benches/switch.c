/* The library that stands before malloc, with two switches for `benches/whole.py`, which compares within one process.
 * Both are to be called with the GIL, on one and the same thread. */
#include "preload.c"
#include <sys/mman.h>
#include <unistd.h>

typedef void domain_call(int domain, struct allocator *);

/* Off: the library passes on what this thread asks for, as before anybody has attached. What is placed stays so. To be
 * called once requests count. */
EXPORT void ctxalloc_bench_switch(bool on) {
    static struct allocator hooks[KINDS];
    static size_t exact;
    static int64_t left;
    static bool is_off;
    domain_call *get = (domain_call *)dlsym(RTLD_DEFAULT, "PyMem_GetAllocator");
    domain_call *set = (domain_call *)dlsym(RTLD_DEFAULT, "PyMem_SetAllocator");
    if (on != is_off) return;
    is_off = !on;
    if (is_off) {
        exact = exact_from;
        left = self.left;
    }
    exact_from = on ? exact : SIZE_MAX;
    self.left = on ? left : INT64_MAX / 2;
    for (int kind = MEM; kind < KINDS; kind++) {
        if (is_off) get(kind, &hooks[kind]);
        set(kind, on ? &hooks[kind] : &original[kind]);
    }
}

/* Where calls of these go: here, or as if this library were not there. */
static const struct {
    const char *name;
    void *ours, **next;
} CALLS[] = {
    {"malloc", (void *)malloc, (void **)&next.malloc},
    {"calloc", (void *)calloc, (void **)&next.calloc},
    {"realloc", (void *)realloc, (void **)&next.realloc},
    {"free", (void *)free, (void **)&next.free},
};

static size_t turn(const ElfW(Rela) *relas, size_t bytes, const ElfW(Sym) *symbols, const char *names, uintptr_t base,
                   bool around) {
    size_t turned = 0;
    for (size_t at = 0; at < bytes / sizeof *relas; at++) {
        uint32_t type = ELF64_R_TYPE(relas[at].r_info);
        if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT && type != R_X86_64_64) continue;
        const char *name = names + symbols[ELF64_R_SYM(relas[at].r_info)].st_name;
        for (size_t n = 0; n < sizeof CALLS / sizeof *CALLS; n++) {
            if (strcmp(name, CALLS[n].name)) continue;
            void **place = (void **)(base + relas[at].r_offset);
            void *to = around ? *CALLS[n].next : CALLS[n].ours;
            /* A variable may have been given another function since. */
            if (type != R_X86_64_JUMP_SLOT && *place != CALLS[n].ours && *place != *CALLS[n].next) continue;
            uintptr_t page = (uintptr_t)place & -(uintptr_t)getpagesize();
            mprotect((void *)page, (size_t)getpagesize(), PROT_READ | PROT_WRITE);
            *place = to;
            turned++;
        }
    }
    return turned;
}

/* Whether every library calls the next allocator, around this one. To be called before anything is placed. Returns how
 * many calls were turned. */
EXPORT size_t ctxalloc_bench_go_around(bool around) {
    Dl_info own;
    if (!dladdr((void *)ctxalloc_bench_go_around, &own)) return 0;
    size_t turned = 0;
    for (struct link_map *library = _r_debug.r_map; library; library = library->l_next) {
        const ElfW(Rela) *calls = NULL, *others = NULL;
        size_t calls_bytes = 0, others_bytes = 0;
        const ElfW(Sym) *symbols = NULL;
        const char *names = NULL;
        if (library->l_addr == (uintptr_t)own.dli_fbase || strstr(library->l_name, "ld-linux")) continue;
        for (const ElfW(Dyn) *part = library->l_ld; part && part->d_tag != DT_NULL; part++) {
            switch (part->d_tag) {
            case DT_JMPREL: calls = (const void *)part->d_un.d_ptr; break;
            case DT_PLTRELSZ: calls_bytes = part->d_un.d_val; break;
            case DT_RELA: others = (const void *)part->d_un.d_ptr; break;
            case DT_RELASZ: others_bytes = part->d_un.d_val; break;
            case DT_SYMTAB: symbols = (const void *)part->d_un.d_ptr; break;
            case DT_STRTAB: names = (const void *)part->d_un.d_ptr; break;
            }
        }
        /* The kernel's library has addresses that are not relocated, and calls nobody. */
        if (!symbols || (uintptr_t)symbols < library->l_addr || (uintptr_t)names < library->l_addr) continue;
        if (calls) turned += turn(calls, calls_bytes, symbols, names, library->l_addr, around);
        if (others) turned += turn(others, others_bytes, symbols, names, library->l_addr, around);
    }
    return turned;
}
