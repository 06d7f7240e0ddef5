/* A NEP 49 handler without ctxalloc: the C heap, but some requests for memory fail. What crashes under it is not ours. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static uint64_t state;      /* of a generator by Vigna (splitmix64) */
static uint64_t threshold;  /* fails where the next number is below */

static int refuses(void)
{
    uint64_t mixed = (state += 0x9e3779b97f4a7c15u);
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return (mixed ^ (mixed >> 31)) < threshold;
}

static void *failing_malloc(void *ctx, size_t size)
{
    (void)ctx;
    return refuses() ? NULL : malloc(size ? size : 1);
}

static void *failing_calloc(void *ctx, size_t count, size_t size)
{
    (void)ctx;
    return refuses() ? NULL : calloc(count ? count : 1, size ? size : 1);
}

static void *failing_realloc(void *ctx, void *block, size_t size)
{
    (void)ctx;
    return refuses() ? NULL : realloc(block, size ? size : 1);
}

static void failing_free(void *ctx, void *block, size_t size)
{
    (void)ctx;
    (void)size;
    free(block);
}

struct handler {
    char name[127];
    uint8_t version;
    struct {
        void *ctx;
        void *(*malloc)(void *, size_t);
        void *(*calloc)(void *, size_t, size_t);
        void *(*realloc)(void *, void *, size_t);
        void (*free)(void *, void *, size_t);
    } allocator;
};

struct handler failing_handler = {
    "plain_failing", 1, {NULL, failing_malloc, failing_calloc, failing_realloc, failing_free},
};

void failing_begin(double probability, uint64_t seed)
{
    threshold = (uint64_t)(probability * 18446744073709551615.0);
    state = seed;
}
