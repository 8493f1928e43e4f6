"""Who may do what, and from where (cases 130, 132, 133)."""
import base64
import re

import pytest
import wire
from conftest import ALICE, BOB
from test_kernels import check_error

OPEN = ["/", "/api", "/healthz", "/login"]
CLOSED = ["/api/kernels", "/api/kernelspecs", "/api/sessions", "/api/status", "/api/me", "/api/sandboxes", "/metrics",
          "/kernelspecs/echo/kernel.js", "/api/kernels/x"]


@pytest.mark.parametrize("path", OPEN)
def test_open_routes_need_no_token(gw, path):
    assert gw.get(path, token=None).status_code == 200
    assert gw.get(path, token="wrong").status_code == 200


@pytest.mark.parametrize("path", CLOSED)
def test_closed_routes_say_401(gw, path):
    r = gw.get(path, token=None)
    check_error(r, 401, "token")
    assert r.headers["WWW-Authenticate"].startswith("Bearer")
    check_error(gw.get(path, token="wrong"), 401)
    check_error(gw.get(path, token=None, headers={"Authorization": "token "}), 401)
    check_error(gw.get(path + "?token=", token=None), 401)


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("header", [
    f"token {ALICE}", f"Token {ALICE}", f"TOKEN  {ALICE}", f"Bearer {ALICE}", f"bearer {ALICE}", basic("", ALICE),
    basic("anything", ALICE),
])
def test_header_forms(gw, header):
    r = gw.get("/api/me", token=None, headers={"Authorization": header})
    assert r.status_code == 200 and r.json()["identity"]["username"] == "alice"


@pytest.mark.parametrize("header", [
    ALICE, f"token {ALICE}x", f"token {ALICE[:-1]}", "token", "Basic", "Basic !!!", basic(ALICE, ""), "Digest x",
    f"token {ALICE} {ALICE}", "Bearer " + "A" * 9000,
])
def test_malformed_headers_are_no_token(gw, header):
    check_error(gw.get("/api/me", token=None, headers={"Authorization": header}), 401)


def test_query_token_and_principals(gw):
    assert gw.get(f"/api/me?token={BOB}", token=None).json()["identity"]["username"] == "bob"
    assert gw.get(f"/api/me?x=1&token={BOB}&1723", token=None).json()["identity"]["username"] == "bob"
    # An empty header is none; a header wins over the query.
    r = gw.get(f"/api/me?token={BOB}", token=None, headers={"Authorization": "token "})
    assert r.json()["identity"]["username"] == "bob"
    assert gw.get(f"/api/me?token={BOB}", token=ALICE).json()["identity"]["username"] == "alice"
    check_error(gw.get(f"/api/me?token={BOB}", token="wrong"), 401)


def cookies(r):
    return {m[0]: m[1] for m in re.findall(r"([\w-]+)=([^;,]*); Path", r.headers["Set-Cookie"])}


def test_login_gives_a_cookie_that_needs_xsrf_for_changes(gw):
    r = gw.get(f"/login?token={ALICE}", token=None)
    assert r.status_code == 302 and r.headers["Location"] == "/"
    c = cookies(r)
    name = next(n for n in c if n != "_xsrf")
    assert ALICE not in r.headers["Set-Cookie"] and "HttpOnly" in r.headers["Set-Cookie"]
    jar = {"Cookie": f"{name}={c[name]}; _xsrf={c['_xsrf']}"}
    assert gw.get("/api/me", token=None, headers=jar).json()["identity"]["username"] == "alice"
    check_error(gw.call("POST", "/api/kernels", token=None, headers=jar, data=b'{"name":"echo"}'), 403, "XSRF")
    ok = {**jar, "X-XSRFToken": c["_xsrf"]}
    r = gw.call("POST", "/api/kernels", token=None, headers=ok, data=b'{"name":"echo"}')
    assert r.status_code == 201
    k = r.json()["id"]
    check_error(gw.call("DELETE", f"/api/kernels/{k}", token=None, headers={**jar, "X-XSRFToken": "x"}), 403)
    # The websocket of a same-origin page: cookie and Origin.
    host = gw.url.split("//")[1]
    ws = wire.Kernel(gw, k, None, headers={**jar, "Origin": f"http://{host}"})
    assert ws.status == 101
    ws.close()
    assert wire.Kernel(gw, k, None, headers={**jar, "Origin": "http://evil.example"}).status == 403
    assert gw.call("DELETE", f"/api/kernels/{k}?_xsrf={c['_xsrf']}", token=None, headers=jar).status_code == 204
    # A foreign page must not read with the ambient cookie either.
    check_error(gw.get("/api/kernels", token=None, headers={**jar, "Origin": "http://evil.example"}), 403, "Origin")
    forged = {"Cookie": f"{name}={c[name][:-1]}0; _xsrf=1"}
    if forged["Cookie"].split(";")[0] != jar["Cookie"].split(";")[0]:
        check_error(gw.get("/api/me", token=None, headers=forged), 401)
    r = gw.get("/logout", token=None, headers=jar)
    assert r.status_code == 302 and "Max-Age=0" in r.headers["Set-Cookie"]


@pytest.mark.parametrize("kw", [
    {"data": {"password": ALICE}}, {"data": {"token": ALICE, "_xsrf": "x"}}, {"json": {"token": ALICE}},
    {"json": {"password": ALICE}},
])
def test_login_by_post(gw, kw):
    r = gw.call("POST", "/login?next=/api/me", token=None, **kw)
    assert r.status_code == 302 and r.headers["Location"] == "/api/me"
    assert cookies(r)


@pytest.mark.parametrize("kw,status", [
    ({"data": {"password": "wrong"}}, 401), ({"json": {"token": "wrong"}}, 401), ({"json": {}}, 400), ({}, 400),
    ({"data": b"password"}, 400), ({"data": b"%%%"}, 400), ({"json": {"token": 5}}, 400), ({"json": []}, 400),
    ({"data": b"{", "headers": {"Content-Type": "application/json"}}, 400),
])
def test_bad_logins(gw, kw, status):
    r = gw.call("POST", "/login", token=None, **kw)
    check_error(r, status)
    assert "Set-Cookie" not in r.headers


@pytest.mark.parametrize("target", ["//evil.example", "http://evil.example", "/\\evil.example", "evil", "",
                                    "/x%0d%0aX-Injected: 1"])
def test_login_does_not_lead_elsewhere(gw, target):
    r = gw.get("/login", token=None, params={"token": ALICE, "next": target})
    assert r.status_code == 302 and r.headers["Location"] == "/"
    assert "X-Injected" not in r.headers


def test_host_names_against_dns_rebinding(gw):
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
        s, _, _ = wire.exchange(gw, f"GET /api/kernels HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert s == 403
        # With the token it is a proxy, not an attack.
        s, _, _ = wire.exchange(gw, f"GET /api/kernels HTTP/1.1\r\nHost: {host}\r\n"
                                f"Authorization: token {ALICE}\r\n\r\n".encode())
        assert s == 200
    for host in ("localhost", "LOCALHOST:1", "[::1]:9", "10.1.2.3", "a.localhost"):
        s, _, _ = wire.exchange(gw, f"GET /api/kernels HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert s == 401


def test_allowed_hosts_and_no_auth(fresh):
    g = fresh("--no-auth", "--allow-host", "gw.example", tokens=())
    assert g.get("/api/me", token=None).json()["identity"]["username"] == "anonymous"
    for host, want in (("gw.example", 200), ("GW.example:80", 200), ("evil.example", 403), ("127.0.0.1", 200)):
        assert g.get("/api/kernels", token=None, headers={"Host": host}).status_code == want
    check_error(g.get("/api/kernels", token=None, headers={"Origin": "http://evil.example"}), 403, "Origin")
    host = g.url.split("//")[1]
    assert g.get("/api/kernels", token=None, headers={"Origin": f"http://{host}"}).status_code == 200
    k = g.post("/api/kernels", {"name": "echo"}, token=None).json()["id"]
    assert wire.Kernel(g, k, None, headers={"Origin": "http://evil.example"}).status == 403
    assert wire.Kernel(g, k, None, headers={"Host": "evil.example"}).status == 403
    ws = wire.Kernel(g, k, None)
    assert ws.status == 101
    ws.close()


def test_a_websocket_from_a_foreign_page_is_refused_even_with_a_token(gw):
    k = gw.kernel()
    for origin, want in (("http://evil.example", 403), ("null", 403), (None, 101), (gw.url, 101)):
        ws = wire.Kernel(gw, k, ALICE, headers={"Origin": origin})
        assert ws.status == want, origin
        if want == 403:
            assert b'"message"' in ws.body and b'"reason"' in ws.body
        ws.close()
    assert gw.get("/api/kernels", headers={"Origin": "http://evil.example"}).status_code == 200


def test_websocket_auth_forms(gw):
    k = gw.kernel()
    for kw, want in (({}, 403), ({"token": "wrong"}, 403), ({"token": BOB}, 404), ({"token": ALICE}, 101)):
        ws = wire.Kernel(gw, k, kw.get("token"))
        assert ws.status == want
        ws.close()
    for query, want in ((f"token={ALICE}", 101), ("token=wrong", 403), (f"session_id=x&token={ALICE}&_=1", 101)):
        ws = wire.WebSocket(gw, f"/api/kernels/{k}/channels?{query}")
        assert ws.status == want
        ws.close()
    # The token never was logged: checked for the whole module when the server stops.


# ---- CORS ----

PATHS = ["/api/kernels", "/api/kernels/x", "/api/kernels/x/interrupt", "/api/kernels/x/restart", "/api/sessions",
         "/api/sessions/y", "/api/kernelspecs", "/api/me", "/api/status", "/api", "/login", "/api/kernels/x/execute"]


def preflight(g, path, origin="https://app.example", wanted="authorization"):
    return g.call("OPTIONS", path, token=None, headers={
        "Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted})


@pytest.mark.parametrize("path", PATHS)
def test_preflight_without_configuration_allows_nothing(gw, path):
    r = preflight(gw, path)
    assert r.status_code in (200, 204) and r.content == b""
    assert "OPTIONS" in r.headers["Allow"]
    assert not [h for h in r.headers if h.lower().startswith("access-control")]
    check_error(gw.call("OPTIONS", "/nope", token=None), 404)


def test_preflight_with_origins(fresh):
    g = fresh("--allow-origin", "https://app.example", "--allow-origin", "http://b.example:1", "--allow-credentials")
    for path in PATHS:
        r = preflight(g, path, wanted="authorization,content-type,x-xsrftoken")
        assert r.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert r.headers["Access-Control-Allow-Credentials"] == "true"
        assert "authorization" in r.headers["Access-Control-Allow-Headers"]
        assert "GET" in r.headers["Access-Control-Allow-Methods"] or "POST" in r.headers["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Origin" not in preflight(g, path, "https://evil.example").headers
    r = g.get("/api/kernels", headers={"Origin": "http://b.example:1"})
    assert r.headers["Access-Control-Allow-Origin"] == "http://b.example:1" and r.headers["Vary"] == "Origin"
    r = g.get("/api/kernels", token=None, headers={"Origin": "https://app.example"})
    assert r.status_code == 401 and r.headers["Access-Control-Allow-Origin"] == "https://app.example"
    k = g.kernel()
    ws = wire.Kernel(g, k, ALICE, headers={"Origin": "https://app.example"})
    assert ws.status == 101
    ws.close()
    assert wire.Kernel(g, k, ALICE, headers={"Origin": "https://evil.example"}).status == 403


def test_any_origin(fresh):
    g = fresh("--allow-origin", "*")
    assert preflight(g, "/api/kernels", "https://x.example").headers["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Credentials" not in preflight(g, "/api/kernels", "https://x.example").headers
    k = g.kernel()
    ws = wire.Kernel(g, k, ALICE, headers={"Origin": "https://x.example"})
    assert ws.status == 101
    ws.close()
