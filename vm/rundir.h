#pragma once
/* STATE/run: one folder per living host, locked by it, holding the folders of its machines. What a
 * killed host left behind is found by its free lock and removed by the next one. Private to vm/. */
#include "common/err.h"

struct vm_rundir {
    char *path;  /* ours */
    int lock_fd; /* keeps it ours */
};
int vm_rundir_open(const char *state_dir, struct vm_rundir *ret, struct err *e);
void vm_rundir_close(struct vm_rundir *d); /* removes it */
