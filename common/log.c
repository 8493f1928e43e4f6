/* A line is built in one stack buffer and leaves in one write(2), so that lines of several threads
 * or processes on the same stderr do not mix. Quoted logfmt values use JSON's escapes: the context
 * text of a log_ctx is turned into JSON members without decoding it. */
#include "common/log.h"
#include "common/slice.h"
#include "common/timefmt.h"
#include "common/utf8.h"
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MSG_MAX 1024 /* of the formatted message, before escaping */
#define CUT_MARK "..."

static struct {
    enum log_level level;
    bool json;
    log_sink_fn sink;
    void *sink_ctx;
} conf = { .level = LOG_LEVEL_INFO };

static const char *const level_names[] = { "error", "warn", "info", "debug" };

void log_configure(enum log_level level, bool json)
{
    conf.level = level;
    conf.json = json;
}

int log_level_parse(const char *s, enum log_level *ret)
{
    for (size_t i = 0; i < sizeof(level_names) / sizeof(level_names[0]); i++) {
        if (strcmp(s, level_names[i]) == 0) {
            *ret = (enum log_level)i;
            return 0;
        }
    }
    return -EINVAL;
}

void log_set_sink(log_sink_fn fn, void *ctx)
{
    conf.sink = fn;
    conf.sink_ctx = ctx;
}

bool log_enabled(enum log_level level)
{
    return level <= conf.level;
}

/* Bounded text: what does not fit is left out, whole characters at a time. */
struct out {
    char *p;
    size_t n, size; /* size includes the NUL */
};

static bool out_raw(struct out *o, const void *p, size_t n)
{
    if (n >= o->size - o->n)
        return false;
    memcpy(o->p + o->n, p, n);
    o->n += n;
    o->p[o->n] = '\0';
    return true;
}

static bool out_str(struct out *o, const char *s)
{
    return out_raw(o, s, strlen(s));
}

/* One character of s at *i in escaped form; advances *i. */
static size_t escape_next(struct slice s, size_t *i, char esc[8])
{
    uint8_t c = s.p[*i];
    size_t len = utf8_len(s.p + *i, s.n - *i);
    if (len == 0) {
        (*i)++;
        return (size_t)snprintf(esc, 8, "%s", UTF8_REPLACEMENT);
    }
    /* C1 controls (U+0080..U+009F) drive terminals too. */
    bool c1 = len == 2 && c == 0xc2 && s.p[*i + 1] < 0xa0;
    unsigned code = c1 ? s.p[*i + 1] : c;
    *i += len;
    if (c == '"' || c == '\\')
        return (size_t)snprintf(esc, 8, "\\%c", c);
    if (c == '\n' || c == '\r' || c == '\t')
        return (size_t)snprintf(esc, 8, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    if (c < 0x20 || c == 0x7f || c1)
        return (size_t)snprintf(esc, 8, "\\u%04x", code);
    memcpy(esc, s.p + *i - len, len);
    return len;
}

/* "s" with quotes; cut (with a mark) so that the closing quote and `spare` more bytes still fit. */
static void out_quoted(struct out *o, struct slice s, size_t spare)
{
    size_t tail = sizeof(CUT_MARK) + spare; /* the mark and a quote */
    if (!out_str(o, "\""))
        return;
    for (size_t i = 0; i < s.n;) {
        char esc[8];
        size_t n = escape_next(s, &i, esc);
        if (o->size - o->n <= n + tail || !out_raw(o, esc, n)) {
            out_str(o, CUT_MARK);
            break;
        }
    }
    out_str(o, "\"");
}

static bool is_bare(const char *s)
{
    for (const char *p = s; *p; p++)
        if (!((*p >= '0' && *p <= '9') || (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') ||
              strchr("-_./:@+,%", *p)))
            return false;
    return *s != '\0';
}

void log_ctx_init(struct log_ctx *c, const struct log_ctx *parent)
{
    if (parent)
        *c = *parent;
    else
        c->text[0] = '\0';
}

void log_ctx_add(struct log_ctx *c, const char *key, const char *value)
{
    struct out o = { c->text, strlen(c->text), sizeof(c->text) };
    if (!value)
        value = "";
    /* Room for at least `k="..."`; otherwise the pair is left out rather than garbled. */
    if (o.size - o.n < strlen(key) + 16)
        return;
    if (o.n)
        out_str(&o, " ");
    out_str(&o, key);
    out_str(&o, "=");
    if (is_bare(value) && strlen(value) < o.size - o.n)
        out_str(&o, value);
    else
        out_quoted(&o, slice_str(value), 0);
}

/* Length of the value at s: a quoted string with escapes, or up to the next space. */
static size_t value_len(const char *s)
{
    if (*s != '"')
        return strcspn(s, " ");
    size_t n = 1;
    while (s[n] && s[n] != '"')
        n += s[n] == '\\' && s[n + 1] ? 2 : 1;
    return n + (s[n] == '"');
}

/* k=v k="v" -> ,"k":"v","k":"v" */
static void out_ctx_json(struct out *o, const char *text)
{
    while (*text) {
        size_t k = strcspn(text, "=");
        if (text[k] == '\0')
            return;
        const char *v = text + k + 1;
        size_t n = value_len(v);
        const char *quote = *v == '"' ? "" : "\"";
        out_str(o, ",\"");
        out_raw(o, text, k);
        out_str(o, "\":");
        out_str(o, quote);
        out_raw(o, v, n);
        out_str(o, quote);
        text = v + n;
        while (*text == ' ')
            text++;
    }
}

static void emit(enum log_level level, struct out *o)
{
    if (conf.sink) {
        conf.sink(conf.sink_ctx, level, o->p);
        return;
    }
    out_str(o, "\n");
    size_t done = 0;
    while (done < o->n) {
        ssize_t n = write(STDERR_FILENO, o->p + done, o->n - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return; /* nobody to tell */
        done += (size_t)n;
    }
}

void log_write(const struct log_ctx *c, enum log_level level, const char *fmt, ...)
{
    if (!log_enabled(level))
        return;
    int saved_errno = errno;
    char msg[MSG_MAX + sizeof(CUT_MARK)];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(msg, MSG_MAX + 1, fmt, ap);
    va_end(ap);
    if (n > MSG_MAX)
        memcpy(msg + MSG_MAX, CUT_MARK, sizeof(CUT_MARK));

    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    char when[TIMEFMT_ISO_LEN + 1];
    timefmt_iso(when, (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000);

    /* Every byte may become "\u001b"; the fixed parts and the context are far below 512. */
    char line[MSG_MAX * 6 + 1024];
    struct out o = { line, 0, sizeof(line) };
    const char *ctx = c ? c->text : "";
    if (conf.json) {
        out_str(&o, "{\"time\":\"");
        out_str(&o, when);
        out_str(&o, "\",\"level\":\"");
        out_str(&o, level_names[level]);
        out_str(&o, "\"");
        out_ctx_json(&o, ctx);
        out_str(&o, ",\"msg\":");
    } else {
        out_str(&o, "time=");
        out_str(&o, when);
        out_str(&o, " level=");
        out_str(&o, level_names[level]);
        out_str(&o, *ctx ? " " : "");
        out_str(&o, ctx);
        out_str(&o, " msg=");
    }
    out_quoted(&o, slice_str(msg), 2);
    if (conf.json)
        out_str(&o, "}");
    emit(level, &o);
    errno = saved_errno;
}
