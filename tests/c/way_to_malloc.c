/* Says whether ctxalloc's library stands first, in a program that takes malloc's address; one that is no PIE has an address
 * of its own for it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

void *(*volatile taken)(size_t);

#ifdef OWN
static _Alignas(16) char heap[1 << 20];
static size_t used;

void *malloc(size_t size) {
    void *block = heap + used;
    used += (size + 15) & ~(size_t)15;
    return block;
}
void free(void *block) { (void)block; }
#endif

int main(void) {
    taken = malloc; /* in code: in data it would be the library's address */
    free(taken(10));
    void *found = dlsym(RTLD_DEFAULT, "ctxalloc_whole_is_first");
    bool (*is_first)(void);
    *(void **)&is_first = found;
    puts(!found ? "absent" : is_first() ? "first" : "behind");
}
