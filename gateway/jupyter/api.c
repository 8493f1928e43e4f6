/* The route table. Everything a client may ask for is listed here and nowhere else. */
#include "gateway/jupyter/api.h"

static void ws_route(struct gw_req *r)
{
    /* Upgrades are answered by ws_conn.c; a plain GET has been refused by gw_req_head_done. */
    gw_reply_error(r, 400, "This is a websocket");
}

static const struct gw_route routes[] = {
    { GW_GET, "/", gw_api_root, GW_ROUTE_OPEN | GW_ROUTE_PAGE },
    { GW_GET, "/healthz", gw_api_healthz, GW_ROUTE_OPEN },
    { GW_GET, "/metrics", gw_api_metrics, GW_ROUTE_METRICS },
    { GW_GET, "/login", gw_api_login_page, GW_ROUTE_OPEN | GW_ROUTE_PAGE },
    { GW_POST, "/login", gw_api_login, GW_ROUTE_OPEN },
    { GW_GET, "/logout", gw_api_logout, GW_ROUTE_OPEN },
    { GW_POST, "/logout", gw_api_logout, GW_ROUTE_OPEN },
    { GW_GET, "/web/{*}", gw_web_file, GW_ROUTE_OPEN | GW_ROUTE_PAGE },
    { GW_GET, "/api", gw_api_version, GW_ROUTE_OPEN },
    { GW_GET, "/api/status", gw_api_status, 0 },
    { GW_GET, "/api/me", gw_api_me, 0 },
    { GW_PATCH, "/api/me", gw_api_me_patch, 0 },
    { GW_POST, "/api/shutdown", gw_api_shutdown, 0 },
    { GW_POST, "/api/security/csp-report", gw_api_csp_report, GW_ROUTE_OPEN },
    { GW_GET, "/api/sandboxes", gw_api_sandboxes, 0 },
    { GW_GET, "/api/kernelspecs", gw_api_specs, 0 },
    { GW_GET, "/api/kernelspecs/{}", gw_api_spec, 0 },
    { GW_GET, "/kernelspecs/{}/{*}", gw_api_spec_file, GW_ROUTE_PAGE },
    { GW_GET, "/api/kernels", gw_api_kernels, 0 },
    { GW_POST, "/api/kernels", gw_api_kernel_start, 0 },
    { GW_GET, "/api/kernels/{}", gw_api_kernel, 0 },
    { GW_DELETE, "/api/kernels/{}", gw_api_kernel_delete, 0 },
    { GW_POST, "/api/kernels/{}/interrupt", gw_api_kernel_interrupt, 0 },
    { GW_POST, "/api/kernels/{}/restart", gw_api_kernel_restart, 0 },
    { GW_POST, "/api/kernels/{}/execute", gw_api_execute, 0 },
    { GW_GET, "/api/kernels/{}/channels", ws_route, GW_ROUTE_WS },
    { GW_GET, "/api/sessions", gw_api_sessions, 0 },
    { GW_POST, "/api/sessions", gw_api_session_create, 0 },
    { GW_GET, "/api/sessions/{}", gw_api_session, 0 },
    { GW_PATCH, "/api/sessions/{}", gw_api_session_patch, 0 },
    { GW_DELETE, "/api/sessions/{}", gw_api_session_delete, 0 },
};

void gw_api_routes(const struct gw_route **ret, size_t *ret_n)
{
    *ret = routes;
    *ret_n = sizeof(routes) / sizeof(routes[0]);
}
