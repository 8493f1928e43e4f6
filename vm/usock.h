#pragma once
/* Unix stream sockets by path, of any length: sun_path holds 107 bytes and state directories are
 * often deeper, so both go through a descriptor of the folder. Private to vm/. */
int vm_usock_listen(const char *path);  /* close-on-exec; fd >= 0 or -errno (-EADDRINUSE: exists) */
int vm_usock_connect(const char *path); /* non-blocking; fd >= 0 or -errno */
