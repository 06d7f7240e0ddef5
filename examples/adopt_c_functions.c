/* A memory pool of some C library, seen through the four functions of NEP 49. Here it only counts over the C heap.
   NumPy calls them with the GIL held; ctxalloc does so too where Rust uses the handler, so no lock is needed. */

#include <stddef.h>
#include <stdlib.h>

struct pool {
    size_t blocks_alive;
};

void *pool_malloc(void *ctx, size_t size)
{
    void *block = malloc(size);
    ((struct pool *)ctx)->blocks_alive += block != NULL;
    return block;
}

void *pool_calloc(void *ctx, size_t nelem, size_t elsize)
{
    void *block = calloc(nelem, elsize);
    ((struct pool *)ctx)->blocks_alive += block != NULL;
    return block;
}

void *pool_realloc(void *ctx, void *block, size_t new_size)
{
    (void)ctx;
    return realloc(block, new_size);
}

/* `size` is a best guess, and `block` may be NULL with a size (NEP 49, and seen). */
void pool_free(void *ctx, void *block, size_t size)
{
    (void)size;
    ((struct pool *)ctx)->blocks_alive -= block != NULL;
    free(block);
}
