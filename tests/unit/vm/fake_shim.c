/* A local shim without kernels: says what the host must hear at each stage. FAKE_SHIM=crash: ends
 * at once; FAKE_SHIM=nospecs: cannot list kernelspecs. */
#include "common/err.h"
#include "proto/gl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct gl_link *the_link;
static int link_fd;

static void say(enum gl_type type, uint32_t stream, const char *text)
{
    struct slice s = slice_str(text);

    gl_link_send(the_link, type, stream, &s, 1);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    (void)ctx;
    (void)payload;
    switch (type) {
    case GL_HELLO:
        gl_link_set_phase(the_link, GL_PHASE_IDLE);
        say(GL_HELLO, 0, "{\"version\":1,\"role\":\"guest\",\"mode\":\"local\",\"kernels\":[]}");
        say(GL_SPECS, 0, "{\"default\":\"echo\",\"kernelspecs\":{}}");
        break;
    case GL_PREPARE:
        say(GL_PREPARED, 0, "{\"ok\":true,\"ms\":1,\"info\":{}}");
        break;
    case GL_RESUME:
        say(GL_RESUMED, 0, "{\"ok\":true,\"us\":{\"entropy\":0,\"clock\":0,\"hooks\":0}}");
        break;
    case GL_ASSIGN:
        say(GL_ASSIGNED, 0, "{\"ok\":true}");
        gl_link_set_phase(the_link, GL_PHASE_RUNNING);
        break;
    case GL_KERNEL_START:
        say(GL_KERNEL_STATE, stream, "{\"state\":\"starting\",\"pid\":1}");
        break;
    case GL_SHUTDOWN:
        exit(0);
    default:
        break;
    }
}

static const struct gl_link_ops ops = { on_message, NULL, NULL };

static int serve(void)
{
    static const struct gl_limits limits = { 1u << 20, 1u << 20 };
    char chunk[65536];
    ssize_t n;

    the_link = gl_link_new(GL_GUEST, &limits, &ops, NULL);
    for (;;) {
        struct slice s;

        while ((s = gl_link_output(the_link)).n > 0) {
            n = write(link_fd, s.p, s.n);
            if (n > 0)
                gl_link_consumed(the_link, (size_t)n);
        }
        n = read(link_fd, chunk, sizeof(chunk));
        if (n == 0 || gl_link_feed(the_link, slice_of(chunk, n > 0 ? (size_t)n : 0), NULL) < 0)
            return 0;
        if (n < 0)
            usleep(1000); /* the descriptor is non-blocking */
    }
}

int main(int argc, char **argv)
{
    const char *mode = getenv("FAKE_SHIM");
    bool specs = argc > 1 && strcmp(argv[1], "--specs") == 0;

    if (mode && strcmp(mode, specs ? "nospecs" : "crash") == 0) {
        fprintf(stderr, "no spoon\n");
        return 7;
    }
    if (specs) {
        puts("{\"default\":\"echo\",\"kernelspecs\":{\"echo\":{\"spec\":{\"argv\":[\"echo\"],"
             "\"display_name\":\"Echo\",\"language\":\"text\"},\"resources\":{}}}}");
        return 0;
    }
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--link-fd") == 0)
            link_fd = (int)strtol(argv[i + 1], NULL, 10);
    return serve();
}
