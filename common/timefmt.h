#pragma once
/* Times as Jupyter clients insist on: UTC, six fractional digits, trailing Z. */
#include <stddef.h>
#include <stdint.h>
#define TIMEFMT_ISO_LEN 27
void timefmt_iso(char ret[TIMEFMT_ISO_LEN + 1], uint64_t wall_us); /* 2026-01-31T12:00:00.000000Z */
/* "1m 05s", "3.2 s", "48 ms": for people. */
void timefmt_span(char *ret, size_t size, uint64_t ms);
/* "1.3 GB", "512 kB": for people (powers of 1000). */
void timefmt_bytes(char *ret, size_t size, uint64_t bytes);
