#pragma once
/* The REST handlers (docs/http-api.md; jupyter.md 1.3, 1.4) and their table. */
#include "gateway/http/request.h"
#include "kernelmgr/km.h"
#include "kernelmgr/km_session.h"

void gw_api_routes(const struct gw_route **ret, size_t *ret_n);

/* api_server.c */
void gw_api_root(struct gw_req *r);
void gw_api_version(struct gw_req *r);
void gw_api_status(struct gw_req *r);
void gw_api_me(struct gw_req *r);
void gw_api_me_patch(struct gw_req *r);
void gw_api_shutdown(struct gw_req *r);
void gw_api_sandboxes(struct gw_req *r);
void gw_api_healthz(struct gw_req *r);
void gw_api_metrics(struct gw_req *r);
void gw_api_csp_report(struct gw_req *r);
/* api_login.c */
void gw_api_login_page(struct gw_req *r);
void gw_api_login(struct gw_req *r);
void gw_api_logout(struct gw_req *r);
/* api_specs.c */
void gw_api_specs(struct gw_req *r);
void gw_api_spec(struct gw_req *r);
void gw_api_spec_file(struct gw_req *r);
/* api_kernels.c */
void gw_api_kernels(struct gw_req *r);
void gw_api_kernel_start(struct gw_req *r);
void gw_api_kernel(struct gw_req *r);
void gw_api_kernel_delete(struct gw_req *r);
void gw_api_kernel_interrupt(struct gw_req *r);
void gw_api_kernel_restart(struct gw_req *r);
/* api_execute.c */
void gw_api_execute(struct gw_req *r);
/* api_sessions.c */
void gw_api_sessions(struct gw_req *r);
void gw_api_session_create(struct gw_req *r);
void gw_api_session(struct gw_req *r);
void gw_api_session_patch(struct gw_req *r);
void gw_api_session_delete(struct gw_req *r);
/* web_files.c */
void gw_web_file(struct gw_req *r);
/* Serve name from the configured web_dir; false: there is none (no reply given). */
bool gw_web_try(struct gw_req *r, const char *name);

/* Milliseconds of each stage of a sandbox's start, new reference. */
json_t *gw_timings(const struct vm_timings *t);
/* Kernel model, new reference. */
json_t *gw_kernel_model(const struct km_kernel *k);
/* The kernel named by the path, or NULL after a 404 reply. */
struct km_kernel *gw_req_kernel(struct gw_req *r);
/* body.env: NULL or an object of strings (borrowed), else -EINVAL. */
int gw_body_env(json_t *body, json_t **ret, struct err *e);
/* Mime type by extension, for resources and the console. */
const char *gw_mime_type(const char *file);
