#pragma once
/* The listening socket: a taken address has a clear error, running out of descriptors does not
 * spin, and connections over the limit are turned away before they cost anything. */
#include "gateway/http/server.h"

/* Bind config.ip:port (and the following port_retries ports). Sets listen_fd and port. -EADDRINUSE,
 * -EACCES, -EINVAL (address), -EADDRNOTAVAIL. */
int gw_listen_open(struct gw_server *s, struct err *e);
/* Start accepting. */
void gw_listen_start(struct gw_server *s);
void gw_listen_close(struct gw_server *s);
