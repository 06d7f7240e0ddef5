/* The allocator of first_draft.c in another library: its struct has the same name, at another address. */
#define PyInit_first_draft PyInit_first_draft_again
#include "first_draft.c"
