#pragma once
/* What every unit test of the shim includes, and a temporary folder. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

/* setup/teardown pair: *state is the path. */
static inline int make_tmp(void **state)
{
    char *dir = xstrdup("/tmp/cv-shim-test-XXXXXX");

    *state = dir;
    return mkdtemp(dir) ? 0 : -1;
}

static inline int remove_tmp(void **state)
{
    fs_rm_rf(*state, NULL);
    free(*state);
    return 0;
}

static inline void put_file(const char *dir, const char *name, const char *text)
{
    CLEANUP(freep) char *path = fs_join(dir, name);
    char *slash = strrchr(path, '/');

    *slash = '\0';
    assert_int_equal(fs_mkdir_p(path, 0755, NULL), 0);
    *slash = '/';
    assert_int_equal(fs_write_atomic(path, slice_str(text), 0644, NULL), 0);
}
