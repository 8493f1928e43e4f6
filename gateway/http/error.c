/* Error mapping; see error.h. */
#include "gateway/http/error.h"
#include <errno.h>

static const struct {
    int code, status;
} codes[] = {
    { 0, 200 },          { -EINVAL, 400 },    { -EPERM, 403 },     { -EACCES, 403 },
    { -EDQUOT, 403 },    { -ENOENT, 404 },    { -ESRCH, 409 },     { -EEXIST, 409 },
    { -ENODEV, 410 },    { -E2BIG, 413 },     { -EFBIG, 413 },     { -ENOBUFS, 413 },
    { -EAGAIN, 503 },    { -EBUSY, 503 },     { -ETIMEDOUT, 504 }, { -ENOSPC, 507 },
    { -ECANCELED, 503 }, { -ESHUTDOWN, 503 },
};

static const struct {
    int status;
    const char *phrase;
} phrases[] = {
    { 100, "Continue" },
    { 200, "OK" },
    { 201, "Created" },
    { 202, "Accepted" },
    { 204, "No Content" },
    { 302, "Found" },
    { 304, "Not Modified" },
    { 308, "Permanent Redirect" },
    { 400, "Bad Request" },
    { 401, "Unauthorized" },
    { 403, "Forbidden" },
    { 404, "Not Found" },
    { 405, "Method Not Allowed" },
    { 408, "Request Timeout" },
    { 409, "Conflict" },
    { 410, "Gone" },
    { 411, "Length Required" },
    { 413, "Content Too Large" },
    { 414, "URI Too Long" },
    { 415, "Unsupported Media Type" },
    { 417, "Expectation Failed" },
    { 426, "Upgrade Required" },
    { 429, "Too Many Requests" },
    { 431, "Request Header Fields Too Large" },
    { 500, "Internal Server Error" },
    { 501, "Not Implemented" },
    { 503, "Service Unavailable" },
    { 504, "Gateway Timeout" },
    { 505, "HTTP Version Not Supported" },
    { 507, "Insufficient Storage" },
};

int gw_status_of(int code)
{
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
        if (codes[i].code == code)
            return codes[i].status;
    return 500;
}

const char *gw_status_phrase(int status)
{
    for (size_t i = 0; i < sizeof(phrases) / sizeof(phrases[0]); i++)
        if (phrases[i].status == status)
            return phrases[i].phrase;
    return "Unknown";
}

int gw_error_body(struct buf *out, int status, const char *reason, const char *message)
{
    int r = buf_append_str(out, "{\"message\":");
    if (!r)
        r = buf_append_json_string(out, slice_str(message));
    if (!r)
        r = buf_append_str(out, ",\"reason\":");
    if (!r)
        r = buf_append_json_string(out, slice_str(reason ? reason : gw_status_phrase(status)));
    if (!r)
        r = buf_append_byte(out, '}');
    return r;
}
