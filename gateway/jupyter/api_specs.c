/* Kernelspecs and their resource files. The manager knows the files; URLs are made here, below
 * base_url. Values that are no sizes (absolute URLs of odd specs, case-136) are left as they are.
 */
#include "gateway/http/server.h"
#include "gateway/http/uri.h"
#include "gateway/jupyter/api.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *resource_key(const char *file, char *buf, size_t size)
{
    /* "logo-64x64.png" is known to clients as "logo-64x64", "logo-svg.svg" as "logo-svg"; scripts
     * and styles go by their file names (jupyter.md 1.3). */
    const char *dot = strrchr(file, '.');
    if (strncmp(file, "logo-", 5) != 0 || !dot || (size_t)(dot - file) >= size)
        return file;
    memcpy(buf, file, (size_t)(dot - file));
    buf[dot - file] = 0;
    return buf;
}

static json_t *resource_url(struct gw_req *r, const char *spec, const char *file)
{
    struct buf b;
    buf_init(&b, 4096);
    json_t *v = NULL;
    if (!buf_append_str(&b, r->server->base) && !buf_append_str(&b, "kernelspecs/") &&
        !gw_uri_encode(&b, spec, NULL) && !buf_append_byte(&b, '/') &&
        !gw_uri_encode(&b, file, NULL) && buf_cstr(&b))
        v = json_string(buf_cstr(&b));
    buf_fini(&b);
    return v ? v : json_null();
}

/* One entry as clients want it, new reference. */
static json_t *entry_for_client(struct gw_req *r, const char *name, json_t *entry)
{
    json_t *out = json_object(), *res = json_object(), *v;
    const char *file;
    char key[128];
    json_object_set_new(out, "name", json_string(name));
    json_object_set(out, "spec", json_object_get(entry, "spec"));
    json_object_foreach(json_object_get(entry, "resources"), file, v)
    {
        if (json_is_integer(v))
            json_object_set_new(res, resource_key(file, key, sizeof(key)),
                                resource_url(r, name, file));
        else
            json_object_set(res, file, v);
    }
    json_object_set_new(out, "resources", res);
    return out;
}

void gw_api_specs(struct gw_req *r)
{
    json_t *all = km_specs(r->server->km), *out = json_object(), *specs = json_object(), *v;
    const char *name;
    json_object_foreach(json_object_get(all, "kernelspecs"), name, v)
        json_object_set_new(specs, name, entry_for_client(r, name, v));
    json_t *dflt = json_object_get(all, "default");
    json_object_set(out, "default", dflt ? dflt : json_null());
    json_object_set_new(out, "kernelspecs", specs);
    json_decref(all);
    gw_reply_json(r, 200, out);
}

void gw_api_spec(struct gw_req *r)
{
    const char *name = gw_arg(r, 0);
    json_t *all = km_specs(r->server->km);
    json_t *entry = json_object_get(json_object_get(all, "kernelspecs"), name);
    json_t *out = entry ? entry_for_client(r, name, entry) : NULL;
    json_decref(all);
    if (out)
        gw_reply_json(r, 200, out);
    else
        gw_reply_error(r, 404, "Kernel spec %s not found", name);
}

const char *gw_mime_type(const char *file)
{
    static const char *const types[][2] = {
        { "png", "image/png" },
        { "svg", "image/svg+xml" },
        { "jpg", "image/jpeg" },
        { "jpeg", "image/jpeg" },
        { "gif", "image/gif" },
        { "webp", "image/webp" },
        { "ico", "image/x-icon" },
        { "js", "text/javascript; charset=utf-8" },
        { "mjs", "text/javascript; charset=utf-8" },
        { "css", "text/css; charset=utf-8" },
        { "html", "text/html; charset=utf-8" },
        { "json", "application/json" },
        { "map", "application/json" },
        { "txt", "text/plain; charset=utf-8" },
        { "md", "text/markdown; charset=utf-8" },
        { "woff2", "font/woff2" },
        { "wasm", "application/wasm" },
    };
    const char *dot = strrchr(file, '.');
    for (size_t i = 0; dot && i < sizeof(types) / sizeof(types[0]); i++)
        if (strcasecmp(dot + 1, types[i][0]) == 0)
            return types[i][1];
    return "application/octet-stream";
}

void gw_api_spec_file(struct gw_req *r)
{
    const char *spec = gw_arg(r, 0), *file = gw_arg(r, 1);
    uint8_t *data = NULL;
    size_t n = 0;
    /* Resources are plain files beside the spec; nothing deeper, nothing above. */
    int e = gw_segment_ok(spec) && gw_segment_ok(file)
                ? km_spec_resource(r->server->km, spec, file, &data, &n)
                : -ENOENT;
    if (e) {
        gw_reply_error(r, 404, "Kernel spec %s has no file %s", spec, file);
        return;
    }
    const char *type = gw_mime_type(file);
    bool png = strcmp(type, "image/png") == 0;
    gw_reply_header(r, "Cache-Control", "%s", png ? "private, max-age=2592000" : "no-cache");
    /* A spec comes out of an image that somebody built: its svg or script must not run as ours. */
    gw_reply_header(r, "Content-Security-Policy",
                    "default-src 'none'; style-src 'unsafe-inline'; sandbox");
    gw_reply_text(r, 200, type, slice_of(data, n));
    free(data);
}
