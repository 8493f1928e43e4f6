#pragma once
/* Paths and queries. head.c has decoded %xx once and resolved dot segments when a path or query
 * argument gets here; never decode again (case-138, case-161). */
#include "common/buf.h"
#include "common/err.h"

/* "", "/", "gw", "/gw", "/gw/" -> "/gw/" (begins and ends with a slash; heap, caller frees).
 * -EINVAL: query, fragment, "..", white space or control characters in it. */
int gw_base_normalise(const char *in, char **ret, struct err *e);
/* What follows base in path, with its leading slash ("/api"), or NULL when path is not below base.
 * base "/gw/": "/gw" and "/gw/" give "/"; "/gwx" is not below. Points into path. */
const char *gw_base_strip(const char *base, const char *path);
/* Append path percent-encoded for a header or URL: everything but unreserved characters, '/', and
 * keep's characters. */
int gw_uri_encode(struct buf *out, const char *path, const char *keep);
/* Value of the first argument called name in "name=value" strings, or NULL. "name" alone gives "".
 */
const char *gw_query_get(char *const *args, size_t n, const char *name);
/* A path segment that may name a file or spec: not "", ".", "..", and no '/' or control character.
 */
bool gw_segment_ok(const char *s);
