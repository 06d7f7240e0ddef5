/* Whether calls of malloc come to the preloaded library (preload.c), and not to one that was preloaded before it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>

/* This library's malloc, whoever's the name is resolved to. */
extern void *own_malloc(size_t) __attribute__((visibility("hidden")));

/* Where `address` is only the program's own way to malloc: a program that is no PIE and takes malloc's address
 * (Debian's Python 3.14) gives the function an address inside of itself, which every dlsym then answers. */
static bool leads_elsewhere(void *address) {
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    return dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol && symbol->st_shndx == SHN_UNDEF;
}

/* Whether calls of malloc come here, and not to a library that was preloaded before this one. */
__attribute__((visibility("default"))) bool ctxalloc_whole_is_first(void) {
    void *found = dlsym(RTLD_DEFAULT, "malloc");
    if (found == (void *)own_malloc) return true;
    if (!leads_elsewhere(found)) return false;
    /* The loader looks through the libraries in this order, after the program. */
    struct link_map *library = dlopen(NULL, RTLD_LAZY);
    while (library && (library = library->l_next)) {
        void *opened = *library->l_name ? dlopen(library->l_name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        if (!opened) continue; /* the kernel's */
        Dl_info info;
        void *at = dlsym(opened, "malloc"); /* its own, or that of a library which it needs */
        bool defines = at && dladdr(at, &info) && info.dli_fbase == (void *)library->l_addr;
        dlclose(opened);
        if (defines) return at == (void *)own_malloc;
    }
    return false;
}
