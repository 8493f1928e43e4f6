#pragma once
/* One kernel websocket = one embedded km_client. Messages in: decoded (proto/jp_ws.h) and
 * submitted; a refused one is kept and input stops until throttle(off). Messages out: pulled from
 * the kernel's log with km_client_next as the socket takes them; there is no queue here, at most
 * one message is under way. Big messages go out in fragments of GW_CHUNK, so that pings and a close
 * need not wait.
 *
 * Close codes (docs/http-api.md): 1000 the kernel is gone for good, 1012 the gateway stops, 4001
 * another connection took this session over, 1002 bad framing, 1007 undecodable message, 1009 too
 * big, 1011 internal error, 1013 out of memory. */
#include "gateway/http/conn.h"
#include "kernelmgr/km.h"

struct gw_ws;
/* The request asks for an upgrade and may have it: replies to r (404, 400, 426), or turns c into a
 * websocket (r is freed then). */
void gw_ws_handshake(struct gw_conn *c, struct gw_req *r);
/* Use the input in c->rx, produce output. -1: the connection is broken. */
int gw_ws_run(struct gw_ws *w);
bool gw_ws_reads(const struct gw_ws *w);
bool gw_ws_writes(const struct gw_ws *w);
/* Detaches from the kernel (its cursor is kept for the session id). */
void gw_ws_free(struct gw_ws *w);
/* Start the closing handshake; the present message is finished first. Idempotent. */
void gw_ws_close(struct gw_ws *w, unsigned code, const char *text);
/* From the server's tick: pings, dead peers. False: connection and w are gone. */
bool gw_ws_tick(struct gw_ws *w);

#define GW_WS_REPLACED 4001u
