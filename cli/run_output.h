#pragma once
/* What `cellvisor run` shows: text live while the code runs, images into files at the end. */
#include "common/err.h"
#include "kernelmgr/km_execution.h"

struct run_output {
    const char *save_dir; /* NULL: images are only mentioned */
    bool color;           /* keep escape sequences of tracebacks */
    bool quiet;           /* nothing live (--json) */
    unsigned images, images_saved;
    struct err error; /* of the first file that could not be written */
};
/* One message of the running code. */
void run_output_message(struct run_output *o, const struct jp_msg *m);
/* Help texts (`len?`) and the like, which a kernel sends in its reply and not as output. */
void run_output_payload(const struct run_output *o, const struct km_execution *x);
/* Save the images of the whole execution; prints a line for each. 0 or -errno (o->error). */
int run_output_images(struct run_output *o, const struct km_execution *x);
