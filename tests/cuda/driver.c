/* A CUDA driver for tests: the functions that ctxalloc resolves, over mmap and malloc, without a device.
 *
 * It keeps its own record and ends the process, with a line on stderr, at what a real driver would let pass until
 * memory is corrupt: unregistering what is not registered, pages unregistered or freed under a running copy, bytes that
 * change under a running copy, a context popped that was not pushed, any call in a child of fork.
 *
 * Copies "run" in one queue. An event stands for all that was queued before it was recorded. Nothing is done until it
 * is asked for: each query completes `progress` copies first. `fake_set` and `fake_get` change and read the numbers
 * below by name; CTXALLOC_FAKE_CUDA="devices=2,init=34" sets them when the library is loaded.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef void *CUcontext;
typedef void *CUevent;
typedef unsigned long long CUdeviceptr;

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, GONE = 4, INVALID_DEVICE = 101, NO_CONTEXT = 201 };
enum { BAD_HANDLE = 400, NOT_READY = 600, REGISTERED = 712, UNSUPPORTED = 900 };
enum { MAX = 4096, DEVICES = 8 };

static struct number {
	const char *name;
	long value;
} numbers[] = {
	{ "init", 0 },              /* what cuInit returns */
	{ "version", 12050 },       /* of the driver */
	{ "devices", 1 },           /* how many there are */
	{ "register", 1 },          /* whether host memory can be registered */
	{ "same_pointers", 1 },     /* whether kernels use the host's addresses */
	{ "concurrent", 1 },        /* whether managed memory is concurrent */
	{ "numa", -1 },             /* the device's node */
	{ "refuse_register", 0 },   /* 1: the next registration is refused, 2: the one after it; -1: all */
	{ "refuse_alloc", 0 },      /* the same for cuMemHostAlloc and cuMemAllocManaged */
	{ "progress", 1000000 },    /* how many copies each query completes */
	{ "dead", 0 },              /* what every call returns from now on */
	{ "capturing", 0 },         /* whether a stream captures a graph */
	{ "invalidated", 0 },       /* how many calls made that capture invalid */
	{ "query_fails", 0 },       /* what cuEventQuery returns */
	{ "attribute_fails", 0 },   /* what cuPointerGetAttribute returns */
	{ "pointer_fails", 0 },     /* what cuMemHostGetDevicePointer returns */
	{ "registrations", 0 },     /* how many there are now */
	{ "registered_bytes", 0 },  /* their bytes */
	{ "allocations", 0 },       /* the driver's own, now */
	{ "registered_ever", 0 },   /* how many there were */
	{ "contexts", 0 },          /* how many primary contexts are retained */
	{ "recorded", 0 },          /* events that were recorded on contexts */
	{ "queries", 0 },           /* events that were asked for */
	{ "running", 0 },           /* copies that are not done */
};

enum name {
	INIT, VERSION, COUNT, REGISTER, SAME_POINTERS, CONCURRENT, NUMA, REFUSE_REGISTER, REFUSE_ALLOC, PROGRESS, DEAD,
	CAPTURING, INVALIDATED, QUERY_FAILS, ATTRIBUTE_FAILS, POINTER_FAILS, REGISTRATIONS, REGISTERED_BYTES, ALLOCATIONS,
	REGISTERED_EVER, CONTEXTS, RECORDED, QUERIES, RUNNING, NUMBERS
};

struct range { char *start; size_t size; int kind; }; /* 1 registered, 2 allocated, 3 managed */
struct copy { const char *from; char *snapshot; size_t size; };
struct event { int device; long after; int is_recorded; };
struct call { void (*function)(void *); void *given; long after; }; /* host functions, on a stream of their own */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[MAX];
static struct copy copies[MAX];
static struct call calls[MAX];
static long calls_queued, calls_done;
static long queued, done; /* copies are numbered; those from `done` to `queued` run */
static int active[DEVICES];
static char contexts[DEVICES];
static pid_t owner;
static int is_gone;
static __thread CUcontext stack[16];
static __thread int depth;
static __thread int mode; /* 0 global, 2 relaxed */

#define N(name) numbers[name].value

static void end(const char *what)
{
	fprintf(stderr, "tests/cuda/driver.c: %s\n", what);
	abort();
}

static struct number *number_named(const char *name, size_t length)
{
	for (int i = 0; i < NUMBERS; i++)
		if (strlen(numbers[i].name) == length && strncmp(numbers[i].name, name, length) == 0)
			return &numbers[i];
	end("there is no such number");
	return NULL;
}

void fake_set(const char *name, long value) { number_named(name, strlen(name))->value = value; }
long fake_get(const char *name) { return number_named(name, strlen(name))->value; }

__attribute__((constructor)) static void begin(void)
{
	const char *text = getenv("CTXALLOC_FAKE_CUDA");
	while (text && *text) {
		const char *equals = strchr(text, '=');
		if (!equals)
			end("CTXALLOC_FAKE_CUDA wants name=value,name=value");
		char *rest;
		long value = strtol(equals + 1, &rest, 10);
		number_named(text, (size_t)(equals - text))->value = value;
		text = *rest == ',' ? rest + 1 : rest;
	}
}

__attribute__((destructor)) static void finish(void) { is_gone = 1; }

/* What every call begins with: its answer if there is nothing to do, else 0 with the lock held. */
static CUresult enter(int needs_context)
{
	if (is_gone)
		return GONE;
	if (owner && getpid() != owner)
		end("a call in a child of fork");
	if (!owner)
		return NOT_INITIALIZED;
	if (N(DEAD))
		return (CUresult)N(DEAD);
	if (needs_context && depth == 0)
		return NO_CONTEXT;
	pthread_mutex_lock(&lock);
	return OK;
}

static CUresult leave(CUresult code)
{
	pthread_mutex_unlock(&lock);
	return code;
}

#define ENTER(needs_context) do { CUresult code_ = enter(needs_context); if (code_) return code_; } while (0)

/* A call that a capture forbids, unless this thread is relaxed. */
static CUresult forbidden(void)
{
	if (!N(CAPTURING) || mode == 2)
		return OK;
	N(INVALIDATED)++;
	return UNSUPPORTED;
}

static int is_refused(enum name which)
{
	if (N(which) < 0)
		return 1;
	return N(which) > 0 && --N(which) == 0;
}

/* Completes copies, each of which must find the bytes that it began with. */
static void complete(long count)
{
	for (; count > 0 && done < queued; count--, done++, N(RUNNING)--) {
		struct copy *copy = &copies[done % MAX];
		if (memcmp(copy->from, copy->snapshot, copy->size) != 0)
			end("bytes changed under a running copy");
		free(copy->snapshot);
	}
	for (; calls_done < calls_queued && calls[calls_done % MAX].after <= done; calls_done++)
		calls[calls_done % MAX].function(calls[calls_done % MAX].given);
}

/* Queues a copy of these bytes to a device, which reads them until it is completed. */
void fake_copy(const void *from, size_t size)
{
	pthread_mutex_lock(&lock);
	if (queued - done == MAX)
		complete(1);
	struct copy *copy = &copies[queued++ % MAX];
	*copy = (struct copy){ from, malloc(size), size };
	memcpy(copy->snapshot, from, size);
	N(RUNNING)++;
	pthread_mutex_unlock(&lock);
}

/* Completes so many copies. */
void fake_run(long count)
{
	pthread_mutex_lock(&lock);
	complete(count);
	pthread_mutex_unlock(&lock);
}

static struct range *range_at(const char *address)
{
	for (int i = 0; i < MAX; i++)
		if (ranges[i].start && address >= ranges[i].start && address < ranges[i].start + ranges[i].size)
			return &ranges[i];
	return NULL;
}

static void add_range(char *start, size_t size, int kind)
{
	int i = 0;
	while (ranges[i].start)
		if (++i == MAX)
			end("too many mappings");
	ranges[i] = (struct range){ start, size, kind };
}

static void remove_range(const char *start, int kind)
{
	struct range *range = range_at(start);
	if (!range || range->start != start || range->kind != kind)
		end("what is unregistered or freed is not there, or not the start of it");
	for (long i = done; i < queued; i++) {
		const char *from = copies[i % MAX].from;
		if (from >= range->start && from < range->start + range->size)
			end("memory is unregistered or freed under a running copy");
	}
	if (kind == 1)
		N(REGISTRATIONS)--, N(REGISTERED_BYTES) -= (long)range->size;
	else
		N(ALLOCATIONS)--, munmap(range->start, range->size);
	range->start = NULL;
}

CUresult cuInit(unsigned flags)
{
	(void)flags;
	if (N(INIT))
		return (CUresult)N(INIT);
	owner = getpid();
	return OK;
}

CUresult cuDriverGetVersion(int *version) { *version = (int)N(VERSION); return OK; }
CUresult cuDeviceGetCount(int *count) { *count = (int)N(COUNT); return OK; }

CUresult cuDeviceGet(int *device, int ordinal)
{
	if (ordinal < 0 || ordinal >= N(COUNT))
		return INVALID_DEVICE;
	*device = ordinal;
	return OK;
}

CUresult cuDeviceGetName(char *name, int length, int device)
{
	snprintf(name, (size_t)length, "Fake %d", device);
	return OK;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
	(void)device;
	switch (attribute) {
	case 19: case 41: case 83: *value = 1; return OK;
	case 89: *value = (int)N(CONCURRENT); return OK;
	case 91: *value = (int)N(SAME_POINTERS); return OK;
	case 99: *value = (int)N(REGISTER); return OK;
	case 134: *value = (int)N(NUMA); return OK;
	default: *value = 0; return attribute > 200 ? INVALID : OK;
	}
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, int device)
{
	ENTER(0);
	if (!active[device])
		N(CONTEXTS)++;
	active[device] = 1;
	*context = &contexts[device];
	return leave(OK);
}

CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active)
{
	ENTER(0);
	*flags = 0;
	*is_active = active[device];
	return leave(OK);
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	ENTER(0);
	if (depth == 16)
		end("too many contexts are pushed");
	stack[depth++] = context;
	return leave(OK);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	if (depth == 0)
		end("a context is popped that was not pushed");
	*context = stack[--depth];
	return OK;
}

CUresult cuThreadExchangeStreamCaptureMode(int *other)
{
	int before = mode;
	mode = *other;
	*other = before;
	return OK;
}

CUresult cuMemHostRegister_v2(void *start, size_t size, unsigned flags)
{
	ENTER(1);
	if (forbidden())
		return leave(UNSUPPORTED);
	if (flags != 3 || (uintptr_t)start % 4096 || size % 4096)
		end("a registration of parts of pages, or with other flags");
	if (is_refused(REFUSE_REGISTER))
		return leave(NO_MEMORY);
	for (int i = 0; i < MAX; i++)
		if (ranges[i].start && (char *)start < ranges[i].start + ranges[i].size && ranges[i].start < (char *)start + size)
			return leave(REGISTERED);
	add_range(start, size, 1);
	N(REGISTRATIONS)++, N(REGISTERED_EVER)++, N(REGISTERED_BYTES) += (long)size;
	return leave(OK);
}

CUresult cuMemHostUnregister(void *start)
{
	ENTER(1);
	remove_range(start, 1);
	return leave(OK);
}

/* Memory of the driver's own, which a child of fork does not have. */
static char *dirty(size_t size)
{
	void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (start == MAP_FAILED || madvise(start, size, MADV_DONTFORK))
		return NULL;
	return memset(start, 0xA5, size);
}

CUresult cuMemHostAlloc(void **start, size_t size, unsigned flags)
{
	ENTER(1);
	if (flags != 3)
		end("an allocation with other flags");
	CUresult code = forbidden();
	if (code || is_refused(REFUSE_ALLOC) || !(*start = dirty(size)))
		return leave(code ? code : NO_MEMORY);
	add_range(*start, size, 2);
	N(ALLOCATIONS)++;
	return leave(OK);
}

CUresult cuMemFreeHost(void *start)
{
	ENTER(1);
	remove_range(start, 2);
	return leave(OK);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *found, void *address, unsigned flags)
{
	(void)flags;
	ENTER(1);
	if (N(POINTER_FAILS))
		return leave((CUresult)N(POINTER_FAILS));
	struct range *range = range_at(address);
	if (!range || range->kind == 3)
		return leave(INVALID);
	*found = (CUdeviceptr)(uintptr_t)address + (range->kind == 1 && !N(SAME_POINTERS) ? 1ull << 40 : 0);
	return leave(OK);
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
	ENTER(1);
	if (N(ATTRIBUTE_FAILS))
		return leave((CUresult)N(ATTRIBUTE_FAILS));
	struct range *range = range_at((const char *)(uintptr_t)address);
	if (!range)
		return leave(INVALID);
	switch (attribute) {
	case 2: *(unsigned *)value = range->kind == 3 ? 2 : 1; return leave(OK);
	case 8: *(char *)value = range->kind == 3; return leave(OK);
	case 9: *(int *)value = 0; return leave(OK);
	default: return leave(INVALID);
	}
}

#ifndef WITHOUT_MANAGED
CUresult cuMemAllocManaged(CUdeviceptr *start, size_t size, unsigned flags)
{
	ENTER(1);
	if (flags != 1)
		end("managed memory for one stream only");
	CUresult code = forbidden();
	char *made = code || is_refused(REFUSE_ALLOC) ? NULL : dirty(size);
	if (!made)
		return leave(code ? code : NO_MEMORY);
	*start = (CUdeviceptr)(uintptr_t)made;
	add_range(made, size, 3);
	N(ALLOCATIONS)++;
	return leave(OK);
}

#endif

CUresult cuMemFree_v2(CUdeviceptr start)
{
	ENTER(1);
	remove_range((char *)(uintptr_t)start, 3);
	return leave(OK);
}

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
	ENTER(1);
	if (flags != 2)
		end("an event that takes the time");
	struct event *made = calloc(1, sizeof *made);
	made->device = (int)((char *)stack[depth - 1] - contexts);
	*event = made;
	return leave(OK);
}

static CUresult record(struct event *event)
{
	event->after = queued, event->is_recorded = 1;
	return OK;
}

enum { STREAM = 77, OWN_STREAM = 88 }; /* of the primary context, and of one of the user's own */
static char own_context;

CUresult cuStreamIsCapturing(void *stream, int *status)
{
	(void)stream;
	*status = N(CAPTURING) != 0;
	return OK;
}

CUresult cuStreamGetCtx(void *stream, CUcontext *context)
{
	ENTER(1);
	*context = (uintptr_t)stream == OWN_STREAM ? &own_context : stack[depth - 1];
	return leave(OK);
}

CUresult cuLaunchHostFunc(void *stream, void (*function)(void *), void *given)
{
	ENTER(1);
	if ((uintptr_t)stream != OWN_STREAM || stack[depth - 1] != &own_context)
		end("a host function on a stream of another context");
	calls[calls_queued++ % MAX] = (struct call){ function, given, queued };
	return leave(OK);
}

CUresult cuEventRecord(CUevent event, void *stream)
{
	ENTER(1);
	if (((struct event *)event)->device != (char *)stack[depth - 1] - contexts || (uintptr_t)stream == OWN_STREAM)
		end("an event is recorded on a stream of another context");
	if ((uintptr_t)stream > 2 && (uintptr_t)stream != STREAM)
		return leave(BAD_HANDLE);
	if (N(CAPTURING))
		end("an event becomes a part of a graph");
	return leave(record(event));
}

#ifndef BEFORE_12_5
CUresult cuCtxRecordEvent(CUcontext context, CUevent event)
{
	ENTER(0);
	if (((struct event *)event)->device != (char *)context - contexts)
		end("an event is recorded on the context of another device");
	if (N(CAPTURING)) {
		N(INVALIDATED)++;
		return leave(UNSUPPORTED);
	}
	N(RECORDED)++;
	return leave(record(event));
}
#endif

CUresult cuEventQuery(CUevent event)
{
	ENTER(1);
	struct event *asked = event;
	CUresult code = forbidden();
	if (code || N(QUERY_FAILS))
		return leave(code ? code : (CUresult)N(QUERY_FAILS));
	if (!asked->is_recorded)
		end("an event is asked that was not recorded");
	N(QUERIES)++;
	complete(N(PROGRESS));
	return leave(asked->after <= done ? OK : NOT_READY);
}
