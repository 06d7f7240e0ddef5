/* A C program without Python: registers, selects, allocates, resizes and frees, from several threads; each interface,
 * the event hook, and bad input. Ends with 0, or says what is wrong. Under valgrind there is nothing to say either. */
#include <ctxalloc.h>
#include <pthread.h>
#include <stdio.h>

#include "headed.h"

#define CHECK(what)                                                                                             \
    do {                                                                                                        \
        if (!(what)) {                                                                                          \
            fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #what,                  \
                    ctxalloc_error_message());                                                                  \
            exit(1);                                                                                            \
        }                                                                                                       \
    } while (0)

static void *with_ctx_malloc(void *ctx, size_t size) { return count((long *)ctx, 1), headed_alloc(size); }
static void *with_ctx_calloc(void *ctx, size_t n, size_t size) { return count((long *)ctx, 1), headed_zeroed(n, size); }
static void *with_ctx_realloc(void *ctx, void *ptr, size_t size)
{
    return count((long *)ctx, 1), headed_realloc(ptr, size);
}
static void with_ctx_free(void *ctx, void *ptr, size_t size) { count((long *)ctx, 1), headed_free(ptr, size); }

static long calls, bytes_in, bytes_out, bytes_across;
static void *in(void *ctx, void *dst, const void *src, size_t size)
{
    (void)ctx;
    return count(&bytes_in, (long)size), memcpy(dst, src, size);
}
static void *out(void *ctx, void *dst, const void *src, size_t size)
{
    (void)ctx;
    return count(&bytes_out, (long)size), memcpy(dst, src, size);
}
static void *across(void *ctx, void *dst, const void *src, size_t size)
{
    (void)ctx;
    return count(&bytes_across, (long)size), memcpy(dst, src, size);
}

static ctxalloc_handler headed_handler = {
    "headed", 1, {&calls, with_ctx_malloc, with_ctx_calloc, with_ctx_realloc, with_ctx_free},
};
static ctxalloc_draft1_handler draft1 = {"headed, draft 1", headed_alloc, headed_zeroed, headed_free, headed_realloc};
static ctxalloc_draft2_handler draft2 = {
    "headed, draft 2", headed_alloc, headed_zeroed, headed_free, headed_realloc, NULL, NULL, NULL,
};

/* ---- threads: each selects, makes blocks, hands half of them on; every block goes home ---- */

#define THREADS 8
#define BLOCKS 200
static void *handed_on[THREADS][BLOCKS];
static pthread_barrier_t all_made;

static void *work(void *argument)
{
    size_t number = (size_t)argument;
    const ctxalloc_handler *own = number % 2 ? &headed_handler : ctxalloc_find(number % 4 ? "pool" : "aligned64");
    CHECK(ctxalloc_get_handler() == ctxalloc_default_handler()); /* a new thread starts with the default */
    CHECK(ctxalloc_set_handler(own) == ctxalloc_default_handler());
    for (size_t i = 0; i < BLOCKS; i++) {
        unsigned char *block = (unsigned char *)ctxalloc_new(i % 50 + 1);
        CHECK(block != NULL && ctxalloc_block_handler(block) == own);
        memset(block, (int)number, i % 50 + 1);
        ctxalloc_set_handler(NULL); /* its own handler resizes it, whatever is selected */
        block = (unsigned char *)ctxalloc_renew(block, i * 10 + 100);
        ctxalloc_set_handler(own);
        CHECK(block != NULL && block[i % 50] == number && ctxalloc_block_handler(block) == own);
        handed_on[number][i] = block;
    }
    pthread_barrier_wait(&all_made);
    for (size_t i = 0; i < BLOCKS; i++) {
        unsigned char *block = (unsigned char *)handed_on[(number + 1) % THREADS][i];
        CHECK(block[0] == (number + 1) % THREADS);
        CHECK(ctxalloc_free(block) == 0);
    }
    return NULL;
}

static void threads(void)
{
    pthread_t all[THREADS];
    pthread_barrier_init(&all_made, NULL, THREADS);
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&all[i], NULL, work, (void *)i) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    pthread_barrier_destroy(&all_made);
    CHECK(counted(&blocks_alive) == 0 && counted(&wrong_sizes) == 0 && counted(&not_ours) == 0);
    CHECK(ctxalloc_get_handler() == ctxalloc_default_handler());
}

/* ---- the three interfaces ---- */

static void final_form(void)
{
    ctxalloc_extras extras = {sizeof extras, 16, CTXALLOC_ANY_THREAD, in, out, across};
    CHECK(ctxalloc_register(&headed_handler, &extras) == &headed_handler);
    CHECK(ctxalloc_register(&headed_handler, NULL) == &headed_handler);
    CHECK(ctxalloc_find("headed") == &headed_handler);
    CHECK(ctxalloc_handler_version(&headed_handler) == 1 && ctxalloc_handler_alignment(&headed_handler) == 16);
    CHECK(strcmp(ctxalloc_handler_name(NULL), "system") == 0);
    CHECK(ctxalloc_set_handler(&headed_handler) == ctxalloc_find("system"));
    CHECK(strcmp(ctxalloc_handler_name(NULL), "headed") == 0);
    char *block = (char *)ctxalloc_new_zeroed(10, 10);
    char *twin = (char *)ctxalloc_new(100);
    CHECK(block != NULL && block[99] == 0 && counted(&calls) > 0);
    CHECK(ctxalloc_copy_in(block + 50, "there", 6) == 0 && bytes_in == 6);
    CHECK(ctxalloc_copy(twin, block, 100) == 0 && bytes_across == 100);
    char text[6];
    CHECK(ctxalloc_copy_out(text, twin + 50, 6) == 0 && bytes_out == 6 && strcmp(text, "there") == 0);
    CHECK(ctxalloc_set_handler(NULL) == &headed_handler);
    char *elsewhere = (char *)ctxalloc_new(100); /* in "system": by way of the host */
    CHECK(ctxalloc_copy(elsewhere, twin, 100) == 0 && bytes_out == 106 && memcmp(elsewhere + 50, "there", 6) == 0);
    CHECK(ctxalloc_free(block) == 0 && ctxalloc_free(twin) == 0 && ctxalloc_free(elsewhere) == 0);
    CHECK(ctxalloc_free(NULL) == 0);
}

static void drafts(void)
{
    CHECK(ctxalloc_draft1_set_handler(&draft1) == NULL && ctxalloc_error_code() == CTXALLOC_NO_ERROR);
    CHECK(strcmp(ctxalloc_draft1_get_handler_name(NULL), "headed, draft 1") == 0);
    void *block = ctxalloc_new(10);
    CHECK(strcmp(ctxalloc_draft1_get_handler_name(block), "headed, draft 1") == 0);
    const ctxalloc_draft2_handler *as_draft2 = ctxalloc_draft2_set_handler(&draft2);
    CHECK(as_draft2 != NULL && strcmp(as_draft2->name, "headed, draft 1") == 0);
    CHECK(ctxalloc_draft2_set_handler(as_draft2) == &draft2);
    CHECK(strcmp(ctxalloc_handler_name(NULL), "headed, draft 1") == 0);
    CHECK(ctxalloc_draft1_set_handler(NULL) == &draft1);
    ctxalloc_set_handler(ctxalloc_find("pool"));
    const ctxalloc_draft1_handler *pool = ctxalloc_draft1_set_handler(&draft1);
    CHECK(pool != NULL && strcmp(pool->name, "pool") == 0);
    char *direct = (char *)pool->realloc(pool->alloc(10), 100);
    CHECK(direct != NULL);
    pool->free(direct, 100);
    CHECK(ctxalloc_draft1_set_handler(pool) == &draft1 && ctxalloc_get_handler() == ctxalloc_find("pool"));
    CHECK(ctxalloc_draft1_set_handler(NULL) == pool);
    CHECK(ctxalloc_free(block) == 0 && counted(&blocks_alive) == 0);
}

/* ---- the event hook ---- */

static long made, moved, freed, inside;

static void hook(void *inp, void *outp, size_t size, void *user_data)
{
    CHECK(user_data == &made);
    count(inp == NULL ? &made : outp != NULL ? &moved : &freed, 1);
    CHECK((inp != NULL && outp == NULL) == (size == 0));
    CHECK(ctxalloc_free(ctxalloc_new(8)) == 0); /* is not told */
    count(&inside, 1);
}

static void events(const char *name)
{
    made = moved = freed = inside = 0;
    ctxalloc_set_handler(ctxalloc_find(name));
    void *data = &calls;
    CHECK(ctxalloc_set_event_hook(hook, &made, &data) == NULL && data == NULL);
    void *block = ctxalloc_renew(ctxalloc_new(10), 1000);
    void *zeros = ctxalloc_new_zeroed(10, 10);
    CHECK(ctxalloc_free(block) == 0 && ctxalloc_free(zeros) == 0);
    CHECK(ctxalloc_set_event_hook(NULL, NULL, &data) == hook && data == &made);
    CHECK(made == 2 && moved == 1 && freed == 2 && inside == 5);
    CHECK(ctxalloc_free(ctxalloc_new(10)) == 0 && made == 2 && freed == 2);
    ctxalloc_set_handler(NULL);
}

/* ---- bad input: an answer and a message, and all is as before ---- */

static void refused(int code, const char *word)
{
    CHECK(ctxalloc_error_code() == code);
    CHECK(strstr(ctxalloc_error_message(), word) != NULL);
}

static void bad_input(void)
{
    ctxalloc_handler bad = headed_handler;
    CHECK(ctxalloc_register(NULL, NULL) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "handler is NULL");
    CHECK(ctxalloc_register(&bad, NULL) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "'headed' is taken");
    bad.version = 2;
    CHECK(ctxalloc_register(&bad, NULL) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "handler struct 2");
    bad.version = 1;
    memset(bad.name, 'x', sizeof bad.name);
    CHECK(ctxalloc_register(&bad, NULL) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "NUL-terminated");
    strcpy(bad.name, "bad");
    bad.allocator.realloc = NULL;
    CHECK(ctxalloc_register(&bad, NULL) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "no realloc function");
    bad.allocator.realloc = with_ctx_realloc;
    ctxalloc_extras extras = {sizeof extras, 3, 0, NULL, NULL, NULL};
    CHECK(ctxalloc_register(&bad, &extras) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "align=3");
    extras.alignment = 0, extras.flags = 8;
    CHECK(ctxalloc_register(&bad, &extras) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "flags=8");
    extras.flags = 0, extras.size_bytes = 4;
    CHECK(ctxalloc_register(&bad, &extras) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "size_bytes 4");
    CHECK(ctxalloc_find(NULL) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "name is NULL");
    CHECK(ctxalloc_find("bad") == NULL);
    refused(CTXALLOC_VALUE_ERROR, "registered are: system");
    CHECK(ctxalloc_set_handler(&bad) == NULL && ctxalloc_get_handler() == ctxalloc_default_handler());
    CHECK(ctxalloc_set_handler((const ctxalloc_handler *)16) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "0x10 is not registered");
    CHECK(ctxalloc_handler_name(&bad) == NULL && ctxalloc_handler_version(&bad) == -1);
    CHECK(ctxalloc_handler_alignment(&bad) == 0);

    static ctxalloc_draft1_handler twin; /* of the same name: two libraries may carry one draft */
    twin = draft1;
    CHECK(ctxalloc_draft1_set_handler(&twin) == NULL && ctxalloc_error_code() == CTXALLOC_NO_ERROR);
    CHECK(strstr(ctxalloc_handler_name(ctxalloc_get_handler()), "@0x") != NULL);
    ctxalloc_set_handler(NULL);

    ctxalloc_draft1_handler bad1 = draft1;
    memset(bad1.name, 'x', 127);
    CHECK(ctxalloc_draft1_set_handler(&bad1) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "127 bytes long");
    bad1.name[0] = 0;
    CHECK(ctxalloc_draft1_set_handler(&bad1) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "must not be empty");
    strcpy(bad1.name, "bad draft");
    bad1.free = NULL;
    CHECK(ctxalloc_draft1_set_handler(&bad1) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "no free function");
    memset(bad1.name, 'x', sizeof bad1.name);
    CHECK(ctxalloc_draft1_set_handler(&bad1) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "NUL-terminated");
    static ctxalloc_draft1_handler changing = {"changing", headed_alloc, headed_zeroed, headed_free, headed_realloc};
    CHECK(ctxalloc_draft1_set_handler(&changing) == NULL && ctxalloc_error_code() == 0);
    CHECK(ctxalloc_draft1_set_handler(NULL) == &changing);
    changing.name[0] = 'C';
    CHECK(ctxalloc_draft1_set_handler(&changing) == NULL);
    refused(CTXALLOC_VALUE_ERROR, "has changed");
    CHECK(ctxalloc_get_handler() == ctxalloc_default_handler());

    char local[10];
    CHECK(ctxalloc_free(local) == -1);
    refused(CTXALLOC_VALUE_ERROR, "no live block");
    CHECK(ctxalloc_renew(local, 10) == NULL);
    CHECK(ctxalloc_block_handler(local) == NULL && ctxalloc_block_handler(NULL) == NULL);
    char *block = (char *)ctxalloc_new(100);
    CHECK(ctxalloc_free(block + 1) == -1);
    CHECK(ctxalloc_copy_in(block + 95, local, 10) == -1);
    refused(CTXALLOC_VALUE_ERROR, "10 bytes from");
    CHECK(ctxalloc_copy_in(block, NULL, 10) == -1 && ctxalloc_copy_out(NULL, block, 10) == -1);
    CHECK(ctxalloc_copy(block, block + 5, 10) == -1);
    refused(CTXALLOC_VALUE_ERROR, "overlap");
    CHECK(ctxalloc_renew(block, SIZE_MAX) == NULL);
    refused(CTXALLOC_MEMORY_ERROR, "could not allocate");
    CHECK(ctxalloc_block_handler(block) != NULL && ctxalloc_free(block) == 0);
    CHECK(ctxalloc_free(block) == -1);
    CHECK(ctxalloc_new(SIZE_MAX) == NULL && ctxalloc_new_zeroed(SIZE_MAX, 2) == NULL);
    CHECK(ctxalloc_error_code() == CTXALLOC_MEMORY_ERROR);
    ctxalloc_clear_error();
    CHECK(ctxalloc_error_code() == 0 && ctxalloc_error_message()[0] == 0);
}

/* More handlers than there are structs to give them out as drafts. */
static void too_many_views(void)
{
    static ctxalloc_handler many[CTXALLOC_DRAFT_VIEWS + 1];
    int refusals = 0;
    for (size_t i = 0; i < CTXALLOC_DRAFT_VIEWS + 1; i++) {
        many[i] = headed_handler;
        snprintf(many[i].name, sizeof many[i].name, "one of many %zu", i);
        CHECK(ctxalloc_register(&many[i], NULL) == &many[i] && ctxalloc_set_handler(&many[i]) != NULL);
        const ctxalloc_draft1_handler *view = ctxalloc_draft1_set_handler(NULL);
        if (view == NULL) {
            refused(CTXALLOC_RUNTIME_ERROR, "all 256 sets of functions");
            CHECK(ctxalloc_get_handler() == &many[i]); /* nothing has changed */
            refusals++;
        } else {
            CHECK(strcmp(view->name, many[i].name) == 0);
        }
        CHECK(ctxalloc_set_handler(NULL) != NULL);
    }
    CHECK(refusals > 0);
}

int main(void)
{
    CHECK(ctxalloc_version()[0] != 0);
    final_form();
    threads();
    drafts();
    events("system");
    events("pool");
    events("headed");
    events("headed, draft 1");
    bad_input();
    too_many_views();
    CHECK(counted(&blocks_alive) == 0 && counted(&wrong_sizes) == 0 && counted(&not_ours) == 0);
    puts("all is well");
    return 0;
}
