#include "common/timefmt.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define US_PER_S UINT64_C(1000000)
#define LAST_US UINT64_C(253402300799999999) /* 9999-12-31T23:59:59.999999Z */

void timefmt_iso(char ret[TIMEFMT_ISO_LEN + 1], uint64_t wall_us)
{
    if (wall_us > LAST_US)
        wall_us = LAST_US;
    time_t s = (time_t)(wall_us / US_PER_S);
    struct tm tm = { 0 };
    gmtime_r(&s, &tm);
    /* Wider than needed, since the compiler cannot see the ranges of struct tm. */
    char text[96];
    snprintf(text, sizeof(text), "%04d-%02d-%02dT%02d:%02d:%02d.%06" PRIu64 "Z", tm.tm_year + 1900,
             tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, wall_us % US_PER_S);
    memcpy(ret, text, TIMEFMT_ISO_LEN);
    ret[TIMEFMT_ISO_LEN] = '\0';
}

void timefmt_span(char *ret, size_t size, uint64_t ms)
{
    uint64_t s = ms / 1000;
    if (ms < 1000)
        snprintf(ret, size, "%" PRIu64 " ms", ms);
    else if (s < 60)
        snprintf(ret, size, "%" PRIu64 ".%" PRIu64 " s", s, ms % 1000 / 100);
    else if (s < 3600)
        snprintf(ret, size, "%" PRIu64 "m %02" PRIu64 "s", s / 60, s % 60);
    else if (s < 86400)
        snprintf(ret, size, "%" PRIu64 "h %02" PRIu64 "m", s / 3600, s % 3600 / 60);
    else
        snprintf(ret, size, "%" PRIu64 "d %02" PRIu64 "h", s / 86400, s % 86400 / 3600);
}

void timefmt_bytes(char *ret, size_t size, uint64_t bytes)
{
    static const char *const units[] = { "B", "kB", "MB", "GB", "TB", "PB", "EB" };
    size_t u = 0;
    uint64_t unit = 1;
    /* The next unit as soon as this one would round to 1000. */
    while (u + 1 < sizeof(units) / sizeof(units[0]) && bytes >= unit * 1000 - unit / 2) {
        unit *= 1000;
        u++;
    }
    uint64_t tenth = unit < 10 ? 1 : unit / 10;
    uint64_t tenths = bytes / tenth + (bytes % tenth >= (tenth + 1) / 2);
    if (u > 0 && tenths < 100)
        snprintf(ret, size, "%" PRIu64 ".%" PRIu64 " %s", tenths / 10, tenths % 10, units[u]);
    else
        snprintf(ret, size, "%" PRIu64 " %s", bytes / unit + (bytes % unit >= (unit + 1) / 2),
                 units[u]);
}
