#include "fake_program.h"
#include "common/fs.h"
#include "common/mem.h"
#include <stdlib.h>
#include <string.h>

char *fake_program(const char *dir, const char *mode)
{
    char *path = xasprintf("%s/qemu-%s", dir, mode);
    char *text = xasprintf("#!/bin/sh\nexec python3 -S -E %s/unit/vm/fake_qemu.py %s \"$@\"\n",
                           TEST_SOURCE_DIR, mode);

    if (fs_write_atomic(path, slice_str(text), 0755, NULL) < 0)
        abort();
    free(text);
    return path;
}
