/* The static console, if there is one (config.web_dir): small files, read when asked for. */
#include "common/fs.h"
#include "common/mem.h"
#include "gateway/http/server.h"
#include "gateway/jupyter/api.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_MAX (8u << 20)

/* The real path of name below dir, heap, or NULL: links and dots cannot lead out of it. */
static char *resolve(const char *dir, const char *name)
{
    char *root = realpath(dir, NULL);
    char *joined = fs_join(dir, name), *real = joined ? realpath(joined, NULL) : NULL;
    free(joined);
    size_t n = root ? strlen(root) : 0;
    if (!root || !real || strncmp(real, root, n) != 0 || real[n] != '/') {
        free(real);
        real = NULL;
    }
    free(root);
    return real;
}

bool gw_web_try(struct gw_req *r, const char *name)
{
    const char *dir = r->server->config.web_dir;
    char *path = dir && !strstr(name, "/.") && name[0] != '.' ? resolve(dir, name) : NULL;
    struct buf b;
    if (!path)
        return false;
    int e = fs_read_file(path, FILE_MAX, &b, NULL);
    free(path);
    if (e)
        return false;
    /* Names with a content hash ("app.1a2b3c4d.js") never change. */
    const char *dot = strchr(name, '.');
    bool hashed = dot && strspn(dot + 1, "0123456789abcdef") >= 8;
    gw_reply_header(r, "Cache-Control", "%s", hashed ? "max-age=31536000, immutable" : "no-cache");
    gw_reply_header(r, "Content-Security-Policy",
                    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' "
                    "'unsafe-inline'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'");
    gw_reply_text(r, 200, gw_mime_type(name), buf_slice(&b));
    buf_fini(&b);
    return true;
}

void gw_web_file(struct gw_req *r)
{
    if (!gw_web_try(r, gw_arg(r, 0)))
        gw_reply_error(r, 404, "Not found: %s", r->uri);
}
