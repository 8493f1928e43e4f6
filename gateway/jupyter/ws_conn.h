#pragma once
/* One kernel websocket = one embedded km_client. Frames in: fragments are put together up to
 * max_ws_message, decoded (proto/jp_ws.h) and submitted; a refused message is kept and input stops
 * until throttle(off). Frames out: pulled from the kernel's log with km_client_next when the socket
 * is writable; there is no queue here, at most one message is under way. Big messages go out in
 * fragments of GW_CHUNK, so that pings and a close need not wait for them.
 *
 * Close codes (docs/http-api.md): 1000 the kernel is gone for good, 1012 the gateway stops, 4001
 * another connection took this session over, 1007 undecodable message, 1009 too big, 1011 internal
 * error, 1013 out of memory. */
#include "gateway/http/conn.h"
#include "kernelmgr/km.h"

struct gw_ws;
/* Inside CONFIRM_UPGRADE: decide. Either replies to r (404, 400, 426), or sets c->ws. */
void gw_ws_handshake(struct gw_conn *c, struct gw_req *r);
/* lws events of a websocket; the return value goes to lws. */
int gw_ws_callback(struct gw_ws *w, int reason, void *in, size_t len);
/* Peer gone: detaches from the kernel (its cursor is kept for the session id). */
void gw_ws_free(struct gw_ws *w);
/* Start the closing handshake; the present message is finished first. Idempotent. */
void gw_ws_close(struct gw_ws *w, unsigned code, const char *text);
/* From the server's tick: pings, dead peers. */
void gw_ws_tick(struct gw_ws *w);

#define GW_WS_REPLACED 4001u
/* Which protocol of the offered list ("a, b") do we take: JP_WS_V1 when it is there and allowed.
 * first: the first offered name (for lws, which refuses a list without a known name). */
#define GW_WS_NAME_MAX 64u
bool gw_ws_offers_v1(const char *list, char first[GW_WS_NAME_MAX]);
