/* Showing an execution in a terminal. Content is hostile: text goes out as it is (it is what the
 * user's own code printed), but file names and decoded sizes are ours. */
#include "cli/run_output.h"
#include "common/buf.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/mem.h"
#include "common/timefmt.h"
#include "proto/jp_json.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define TEXT_MAX (256u << 20)
#define IMAGE_MAX (256u << 20)

static char *text_of(struct slice object, const char *key)
{
    struct slice v;
    char *s = NULL;
    if (jp_json_find(object, key, &v) < 0 || jp_json_string_dup(v, TEXT_MAX, &s) < 0)
        return NULL;
    return s;
}

/* Write without escape sequences (ESC [ ... letter). */
static void put_plain(FILE *f, const char *s)
{
    while (*s) {
        if (s[0] == '\x1b' && s[1] == '[') {
            s += 2;
            s += strspn(s, "0123456789;?");
            s += *s != 0;
            continue;
        }
        fputc(*s++, f);
    }
}

static void show_stream(struct slice content)
{
    CLEANUP(freep) char *name = text_of(content, "name");
    CLEANUP(freep) char *text = text_of(content, "text");
    if (!text)
        return;
    FILE *f = name && strcmp(name, "stderr") == 0 ? stderr : stdout;
    fputs(text, f);
    fflush(f);
}

static bool has_image(struct slice data)
{
    size_t pos = 0;
    struct slice key, value;
    while (jp_json_member(data, &pos, &key, &value) == 1)
        if (slice_starts(key, "image/"))
            return true;
    return false;
}

static void show_data(const struct run_output *o, struct slice content)
{
    struct slice data;
    if (jp_json_find(content, "data", &data) < 0)
        return;
    if (has_image(data) && o->save_dir)
        return; /* its own line comes when it is saved */
    CLEANUP(freep) char *text = text_of(data, "text/plain");
    if (text)
        puts(text);
    fflush(stdout);
}

/* Iterate a JSON array: *rest starts as the array; false at its end. */
static bool next_item(struct slice *rest, bool first, struct slice *ret)
{
    if (first) {
        if (rest->n < 2 || rest->p[0] != '[')
            return false;
        *rest = slice_of(rest->p + 1, rest->n - 2);
    }
    while (rest->n && strchr(" \t\r\n,", rest->p[0]))
        *rest = slice_of(rest->p + 1, rest->n - 1);
    return rest->n && jp_json_value(*rest, ret, rest) == 0;
}

static void show_error(const struct run_output *o, struct slice content)
{
    struct slice list, item;
    size_t lines = 0;
    fflush(stdout);
    if (jp_json_find(content, "traceback", &list) < 0)
        list = SLICE_NULL;
    for (bool first = true; next_item(&list, first, &item); first = false) {
        char *line = NULL;
        if (jp_json_string_dup(item, TEXT_MAX, &line) == 0) {
            o->color ? (void)fputs(line, stderr) : put_plain(stderr, line);
            fputc('\n', stderr);
            lines++;
        }
        free(line);
    }
    if (lines == 0) {
        CLEANUP(freep) char *name = text_of(content, "ename");
        CLEANUP(freep) char *value = text_of(content, "evalue");
        fprintf(stderr, "%s: %s\n", name ? name : "Error", value ? value : "");
    }
}

void run_output_message(struct run_output *o, const struct jp_msg *m)
{
    if (o->quiet || m->parts.channel != JP_IOPUB)
        return;
    struct slice content = m->parts.content;
    if (strcmp(m->msg_type, "stream") == 0)
        show_stream(content);
    else if (strcmp(m->msg_type, "execute_result") == 0 || strcmp(m->msg_type, "display_data") == 0)
        show_data(o, content);
    else if (strcmp(m->msg_type, "error") == 0)
        show_error(o, content);
}

/* ---- what comes only with the reply ---- */

void run_output_payload(const struct run_output *o, const struct km_execution *x)
{
    struct buf b;
    struct slice list, item, data;
    if (o->quiet)
        return;
    buf_init(&b, (size_t)1 << 31);
    if (km_execution_write_json(x, &b) == 0 && jp_json_find(buf_slice(&b), "payload", &list) == 0) {
        for (bool first = true; next_item(&list, first, &item); first = false) {
            CLEANUP(freep) char *text = NULL;
            if (jp_json_find(item, "data", &data) == 0)
                text = text_of(data, "text/plain"); /* a page: `len?` */
            else
                text = text_of(item, "text"); /* set_next_input: %load */
            if (text) {
                put_plain(stdout, text);
                putchar('\n');
            }
        }
        fflush(stdout);
    }
    buf_fini(&b);
}

/* ---- images ---- */

static const char *image_suffix(struct slice mime, bool *ret_text)
{
    static const struct {
        const char *mime, *suffix;
        bool text;
    } known[] = {
        { "image/png", "png", false },    { "image/jpeg", "jpg", false },
        { "image/gif", "gif", false },    { "image/webp", "webp", false },
        { "image/svg+xml", "svg", true },
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (slice_eq_str(mime, known[i].mime)) {
            *ret_text = known[i].text;
            return known[i].suffix;
        }
    }
    return NULL;
}

/* Base64 of notebooks has line ends in it. */
static size_t drop_white_space(char *s)
{
    size_t n = 0;
    for (const char *p = s; *p; p++)
        if (!strchr(" \t\r\n", *p))
            s[n++] = *p;
    s[n] = 0;
    return n;
}

static int decode_image(char *text, bool is_text, uint8_t **ret, size_t *ret_len)
{
    if (is_text) {
        *ret_len = strlen(text);
        *ret = (uint8_t *)slice_dup(slice_str(text));
        return *ret ? 0 : -ENOMEM;
    }
    size_t n = drop_white_space(text), room = n / 4 * 3 + 3;
    uint8_t *bytes = malloc(room);
    if (!bytes)
        return -ENOMEM;
    int r = id_base64_decode(slice_of(text, n), bytes, &room);
    if (r < 0) {
        free(bytes);
        return r;
    }
    *ret = bytes;
    *ret_len = room;
    return 0;
}

static void save_image(void *ctx, struct slice mime, struct slice value)
{
    struct run_output *o = ctx;
    bool is_text = false;
    const char *suffix = image_suffix(mime, &is_text);
    o->images++;
    if (!o->save_dir || !suffix || o->error.code)
        return;
    CLEANUP(freep) char *text = NULL;
    CLEANUP(freep) uint8_t *bytes = NULL;
    size_t n = 0;
    if (jp_json_string_dup(value, IMAGE_MAX, &text) < 0 ||
        decode_image(text, is_text, &bytes, &n) < 0) {
        fprintf(stderr, "image %u: %.*s that cannot be decoded\n", o->images, SLICE_FMT(mime));
        return;
    }
    CLEANUP(freep) char *path = xasprintf("%s/image-%03u.%s", o->save_dir, o->images, suffix);
    if (fs_write_atomic(path, slice_of(bytes, n), 0644, &o->error) < 0)
        return;
    o->images_saved++;
    if (!o->quiet) {
        char size[32];
        timefmt_bytes(size, sizeof(size), n);
        printf("%s (%.*s, %s)\n", path, SLICE_FMT(mime), size);
        fflush(stdout);
    }
}

int run_output_images(struct run_output *o, const struct km_execution *x)
{
    if (o->save_dir && fs_mkdir_p(o->save_dir, 0755, &o->error) < 0)
        return o->error.code;
    km_execution_each_mime(x, "image/", save_image, o);
    if (!o->save_dir && o->images && !o->quiet)
        fprintf(stderr, "%u image%s not saved; --save-images DIR keeps them\n", o->images,
                o->images == 1 ? "" : "s");
    return o->error.code;
}
