/* An allocator that puts 64 bytes before each block, with its size and a mark, and looks at them when the block comes
 * back: the sample of NEP 49's first draft, told anew. It counts what is wrong, so that a test can ask. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_BYTES 64
#define MARK 0x6865616465642121u /* "headed!!" */

struct head {
    uint64_t mark;
    size_t size;
};

static long blocks_alive, wrong_sizes, not_ours;

static void count(long *counter, long change) { __atomic_fetch_add(counter, change, __ATOMIC_SEQ_CST); }
static long counted(long *counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }

static void *headed(char *real, size_t size)
{
    if (real == NULL) {
        return NULL;
    }
    struct head *head = (struct head *)real;
    head->mark = MARK;
    head->size = size;
    count(&blocks_alive, 1);
    return real + HEAD_BYTES;
}

static struct head *head_of(void *block)
{
    struct head *head = (struct head *)((char *)block - HEAD_BYTES);
    if (head->mark != MARK) {
        count(&not_ours, 1);
        return NULL;
    }
    return head;
}

static void *headed_alloc(size_t size)
{
    return size > SIZE_MAX - HEAD_BYTES ? NULL : headed((char *)malloc(size + HEAD_BYTES), size);
}

static void *headed_zeroed(size_t nelems, size_t elsize)
{
    if (elsize != 0 && nelems > (SIZE_MAX - HEAD_BYTES) / elsize) {
        return NULL;
    }
    return headed((char *)calloc(1, nelems * elsize + HEAD_BYTES), nelems * elsize);
}

static void headed_free(void *block, size_t size)
{
    if (block == NULL) {
        return;
    }
    struct head *head = head_of(block);
    if (head == NULL) {
        return;
    }
    if (head->size != size) {
        count(&wrong_sizes, 1);
    }
    head->mark = 0;
    count(&blocks_alive, -1);
    free(head);
}

static void *headed_realloc(void *block, size_t size)
{
    if (block == NULL) {
        return headed_alloc(size);
    }
    struct head *head = head_of(block);
    if (head == NULL || size > SIZE_MAX - HEAD_BYTES) {
        return NULL;
    }
    head = (struct head *)realloc(head, size + HEAD_BYTES);
    if (head == NULL) {
        return NULL;
    }
    head->size = size;
    return (char *)head + HEAD_BYTES;
}
