#pragma once
/* One line per event on stderr, logfmt or JSON. Context is passed explicitly as a log_ctx, which an
 * object embeds ("kernel=.. vm=.."). Whoever handles an error logs it, once. Control characters are
 * escaped; a message is cut at 1024 bytes, a context at the size of its struct. Never pass tokens,
 * keys or code cells. */
#include <stdbool.h>

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

struct log_ctx {
    char text[160]; /* "k=v k=v" */
};

void log_configure(enum log_level level, bool json);
int log_level_parse(const char *s, enum log_level *ret); /* -EINVAL */
/* Tests capture lines: sink NULL restores stderr. */
typedef void (*log_sink_fn)(void *ctx, enum log_level level, const char *line);
void log_set_sink(log_sink_fn fn, void *ctx);

void log_ctx_init(struct log_ctx *c, const struct log_ctx *parent); /* parent may be NULL */
void log_ctx_add(struct log_ctx *c, const char *key, const char *value);

bool log_enabled(enum log_level level);
void log_write(const struct log_ctx *c, enum log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
#define log_error(c, ...) log_write((c), LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(c, ...) log_write((c), LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(c, ...) log_write((c), LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(c, ...)                                                                          \
    do {                                                                                           \
        if (log_enabled(LOG_LEVEL_DEBUG))                                                          \
            log_write((c), LOG_LEVEL_DEBUG, __VA_ARGS__);                                          \
    } while (0)
