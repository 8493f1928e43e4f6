#pragma once
/* Browser-side guards (jupyter.md 1.9): the Host check against DNS rebinding, the Origin check, and
 * CORS headers. Pure functions over the configuration. */
#include "common/buf.h"
#include "gateway/gateway.h"

/* Is this Host header (with or without port) a name of ours? IP literals and localhost always are:
 * a rebinding attack needs a name. A missing Host (HTTP/1.0) is fine: browsers always send one. */
bool gw_host_ok(const struct gw_config *c, const char *host);
/* Is a page of this origin allowed to talk to us? No Origin: not a browser page; same host and port
 * as Host; or configured. "null" only when "*" or "null" is configured. */
bool gw_origin_ok(const struct gw_config *c, const char *origin, const char *host);
/* Append the CORS headers of a response ("Access-Control-Allow-Origin: ..\r\n" ...), nothing when
 * the origin is not configured. preflight adds methods, headers (request_headers echoed when they
 * are well-formed) and the cache time. */
int gw_cors_headers(const struct gw_config *c, const char *origin, bool preflight,
                    const char *allow, const char *request_headers, struct buf *out);
