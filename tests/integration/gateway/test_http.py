"""HTTP itself: framing, limits, odd clients, and the routes about the server."""
import json
import resource
import socket
import threading
import time

import pytest
import wire
from conftest import ALICE, BOB
from test_kernels import check_error

AUTH = f"Authorization: token {ALICE}\r\n"


def req(method, path, *lines, body=b"", auth=True):
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n" + (AUTH if auth else "")
    return (head + "".join(f"{x}\r\n" for x in lines) + "\r\n").encode() + body


def chunks(data, *sizes):
    out, at = b"", 0
    for n in [*sizes, len(data)]:
        part = data[at:at + n]
        at += n
        if part:
            out += b"%x\r\n" % len(part) + part + b"\r\n"
    return out + b"0\r\n\r\n"


def error_body(status, body):
    v = json.loads(body)
    assert set(v) == {"message", "reason"}, (status, body)
    return v["message"]


# ---- bodies ----

@pytest.mark.parametrize("sizes", [(), (1,), (3, 5), (1,) * 15])
def test_chunked_bodies(gw, sizes):
    s, h, body = wire.exchange(gw, req("POST", "/api/kernels", "Transfer-Encoding: chunked",
                                       body=chunks(b'{"name":"echo"}', *sizes)))
    assert s == 201 and json.loads(body)["name"] == "echo"


def test_chunked_bodies_byte_by_byte(gw):
    data = req("POST", "/api/kernels", "Transfer-Encoding: Chunked", body=chunks(b'{"name":"echo"}', 4))
    with wire.connect(gw) as s:
        for i in range(len(data)):
            s.sendall(data[i:i + 1])
        assert wire.read_response(s)[0] == 201


def test_chunked_trailers_and_extensions(gw):
    body = b'5;a="b"\r\n{"nam\r\na\r\ne":"echo"}\r\n0;x\r\nX-T: 1\r\n\r\n'
    assert wire.exchange(gw, req("POST", "/api/kernels", "Transfer-Encoding: chunked", body=body))[0] == 201


@pytest.mark.parametrize("body", [b"zz\r\n", b"-1\r\n", b"5\r\n{}xxx", b"1\n{", b"ffffffffffffffffff\r\n",
                                  b"2\r\n{}\r\n0\r\n\n", b"\r\n"])
def test_malformed_chunks(gw, body):
    s, h, text = wire.exchange(gw, req("POST", "/api/kernels", "Transfer-Encoding: chunked",
                                       body=body + b"x" * 10))
    assert s == 400 and h["connection"] == "close"
    error_body(s, text)


@pytest.mark.parametrize("method,lines,want", [
    ("POST", ["Content-Length: 5", "Transfer-Encoding: chunked"], 400), ("POST", ["Content-Length: -5"], 400),
    ("POST", ["Content-Length: 5, 5"], 400), ("POST", ["Content-Length: abc"], 400),
    ("POST", ["Content-Length: 99999999999999999999"], 400), ("POST", ["Content-Length: 5", "Content-Length: 6"], 400),
    ("POST", ["Transfer-Encoding: gzip"], 501), ("POST", ["Transfer-Encoding: gzip, chunked"], 501),
    ("POST", ["Transfer-Encoding : chunked"], 400), ("POST", ["X: y", " folded: 1"], 400),
    ("GET", ["Content-Length: 3", "Content-Length: 3"], 400), ("POST", ["Host: other"], 400),
])
def test_ambiguous_framing_closes_the_connection(gw, method, lines, want):
    with wire.connect(gw) as s:
        s.sendall(req(method, "/api/kernels", *lines, body=b"0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"))
        status, h, body = wire.read_response(s)
        assert status == want and h["connection"] == "close"
        error_body(status, body)
        assert wire.closed(s)
    assert "smuggled" not in gw.log()


def test_a_declared_body_that_is_too_big_is_413(fresh):
    g = fresh("--max-body", "1")
    s, h, body = wire.exchange(g, req("POST", "/api/kernels", "Content-Length: 1048577"))
    assert s == 413
    assert "1048576" in error_body(s, body)
    big = b'{"name":"echo","x":"' + b"x" * (1 << 20) + b'"}'
    check_error(g.call("POST", "/api/kernels", data=big), 413)
    s, _, body = wire.exchange(g, req("POST", "/api/kernels", "Transfer-Encoding: chunked", body=chunks(big, 70000)))
    assert s == 413
    fits = b'{"name":"echo","x":"' + b"x" * ((1 << 20) - 100) + b'"}'
    assert g.call("POST", "/api/kernels", data=fits).status_code == 201


def test_a_refused_body_does_not_break_the_connection(gw):
    with wire.connect(gw) as s:
        s.sendall(req("POST", "/api/kernels", "Content-Length: 200000", body=b"x" * 200000, auth=False) +
                  req("GET", "/api"))
        assert wire.read_response(s)[0] == 401
        assert wire.read_response(s)[0] == 200


def test_expect_100_continue(gw):
    with wire.connect(gw) as s:
        s.sendall(req("POST", "/api/kernels", "Content-Length: 15", "Expect: 100-continue"))
        assert wire.read_response(s)[0] == 100
        s.sendall(b'{"name":"echo"}')
        assert wire.read_response(s)[0] == 201
    with wire.connect(gw) as s:  # refused before the body is sent
        s.sendall(req("POST", "/api/kernels", "Content-Length: 15", "Expect: 100-continue", auth=False))
        assert wire.read_response(s)[0] == 401


def test_a_post_without_length_has_no_body(gw):
    k = gw.kernel()
    for path, want in (("/api/kernels", 201), (f"/api/kernels/{k}/interrupt", 204), (f"/api/kernels/{k}/restart", 200)):
        with wire.connect(gw) as s:
            s.sendall(req("POST", path))
            assert wire.read_response(s)[0] == want


# ---- connections ----

def test_keep_alive_and_pipelining(gw):
    k = gw.kernel()
    with wire.connect(gw) as s:
        s.sendall(req("GET", "/api") + req("POST", f"/api/kernels/{k}/interrupt", "Content-Length: 2", body=b"{}") +
                  req("GET", f"/api/kernels/{k}") + req("GET", "/nope") +
                  req("POST", f"/api/kernels/{k}/restart", "Content-Length: 0") +
                  req("DELETE", f"/api/kernels/{k}") + req("GET", "/api", "Connection: close"))
        got = [wire.read_response(s)[0] for _ in range(7)]
        assert got == [200, 204, 200, 404, 200, 204, 200]
        assert wire.closed(s)


def test_http_1_0(gw):
    with wire.connect(gw) as s:
        s.sendall(b"GET /api HTTP/1.0\r\n\r\n")
        status, h, _ = wire.read_response(s)
        assert status == 200 and h["connection"] == "close"
        assert wire.closed(s)
    with wire.connect(gw) as s:
        s.sendall(b"GET /api HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
        assert [wire.read_response(s)[0] for _ in range(2)] == [200, 200]


def test_a_request_in_single_bytes(gw):
    with wire.connect(gw) as s:
        for b in req("GET", "/api/status"):
            s.sendall(bytes([b]))
        assert wire.read_response(s)[0] == 200


def test_head(gw):
    for path in ("/api", "/api/kernels", "/api/kernelspecs", "/", "/healthz"):
        get = gw.get(path)
        head = gw.call("HEAD", path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["Content-Length"] == str(len(get.content))
    assert gw.call("HEAD", "/api/kernels/x/interrupt").status_code == 405
    assert gw.call("HEAD", "/api/kernels/nope").status_code == 404


def test_redirect_of_trailing_slashes(gw):
    r = gw.get("/api/kernels/?a=1&b=%26")
    assert r.status_code == 302 and r.headers["Location"] == "/api/kernels?a=1&b=%26"
    assert gw.call("POST", "/api/kernels/").status_code == 308
    assert gw.get("/nope/").status_code == 404


@pytest.mark.parametrize("method,path,allow", [
    ("PUT", "/api/kernels", {"GET", "HEAD", "POST", "OPTIONS"}), ("POST", "/api/kernels/x", {"GET", "HEAD", "DELETE", "OPTIONS"}),
    ("GET", "/api/kernels/x/interrupt", {"POST", "OPTIONS"}), ("DELETE", "/api/me", {"GET", "HEAD", "PATCH", "OPTIONS"}),
    ("PATCH", "/api", {"GET", "HEAD", "OPTIONS"}), ("GET", "/api/shutdown", {"POST", "OPTIONS"}),
])
def test_405_names_what_works(gw, method, path, allow):
    r = gw.call(method, path)
    check_error(r, 405, method)
    assert set(r.headers["Allow"].split(", ")) == allow


@pytest.mark.parametrize("data", [
    b"BREW /api HTTP/1.1\r\nHost: x\r\n\r\n", b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    b"get /api HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x00\r\n\r\n", b"GET /api HTTP/2.0\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /api HTTP/1.1\r\n\r\n",
])
def test_what_is_no_http_is_answered(gw, data):
    with wire.connect(gw) as s:
        s.sendall(data)
        status, h, body = wire.read_response(s)
        assert status in (400, 501, 505)
        error_body(status, body)
        assert wire.closed(s)
    assert gw.get("/api").status_code == 200


@pytest.mark.parametrize("uri", ["/" + "a" * 9000, "/api?x=" + "b" * 9000])
def test_long_uris_are_414(gw, uri):
    s, h, body = wire.exchange(gw, req("GET", uri))
    assert s == 414
    error_body(s, body)


@pytest.mark.parametrize("lines", [["Cookie: " + "c" * 40000], ["X-Unknown: " + "c" * 40000],
                                   [f"X-{i}: " + "y" * 8000 for i in range(40)], ["A: b"] * 200])
def test_long_headers_are_431(gw, lines):
    with wire.connect(gw) as s:
        try:
            s.sendall(req("GET", "/api", *lines))
        except ConnectionError:
            pass
        status, h, body = wire.read_response(s)
        assert status == 431 and h["connection"] == "close"
        error_body(status, body)
        assert wire.closed(s)
    assert gw.get("/api").status_code == 200


def test_many_query_arguments_are_refused(gw):
    assert gw.get("/api?" + "&".join(f"a{i}=1" for i in range(30))).status_code == 200
    r = wire.exchange(gw, req("GET", "/api?" + "&".join(f"a{i}" for i in range(65))))
    assert r[0] == 400


@pytest.mark.parametrize("path", ["/api/%zz", "/%", "/api%2", "/%00", "api", "*"])
def test_malformed_targets_are_400(gw, path):
    status, _, body = wire.exchange(gw, req("GET", path))
    assert status == 400
    error_body(status, body)


def test_absolute_targets_are_taken(gw):
    assert wire.exchange(gw, req("GET", "http://localhost/api?x=1"))[0] == 200


def test_an_upgrade_to_something_else_is_ignored(gw):
    for up in ("h2c", "foo"):
        s, h, _ = wire.exchange(gw, req("GET", "/api", f"Upgrade: {up}", "Connection: Upgrade, HTTP2-Settings",
                                        "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"))
        assert s == 200 and h["connection"] == "keep-alive", up


@pytest.mark.parametrize("n", [2, 50, 500])
def test_pipelines_of_any_length(gw, n):
    """Also those that stop the clock of other servers: bodies and unfinished rests in one packet."""
    with wire.connect(gw) as s:
        data = b"".join(req("POST", "/api/kernels/x/interrupt", "Content-Length: 2", body=b"{}") if i % 2 else
                        req("POST", "/api/kernels/x/restart", "Transfer-Encoding: chunked", body=chunks(b"{}", 1))
                        for i in range(n))
        s.sendall(data + req("GET", "/api")[:-3])
        for _ in range(n):
            assert wire.read_response(s)[0] == 404
        s.sendall(req("GET", "/api")[-3:])
        assert wire.read_response(s)[0] == 200
    assert gw.get("/api").status_code == 200


def test_a_chunked_body_keeps_the_connection(gw):
    with wire.connect(gw) as s:
        for method, path, want in (("POST", "/api/kernels", 201), ("GET", "/api", 200), ("DELETE", "/api/kernels/x", 404)):
            s.sendall(req(method, path, "Transfer-Encoding: chunked", body=chunks(b'{"name":"echo"}', 4)))
            status, h, _ = wire.read_response(s)
            assert status == want and h["connection"] == "keep-alive"


def test_the_descriptor_count_is_flat(gw):
    gw.get("/api")
    before = gw.fds()
    for _ in range(60):
        with wire.connect(gw) as s:
            s.sendall(req("GET", "/api")[:20])
        wire.exchange(gw, req("GET", "/api/kernels"))
    wire.wait_for(lambda: gw.fds() <= before + 3, what="descriptors given back")


def test_a_slow_reader_of_a_big_reply_gets_all_of_it(gw):
    k = gw.kernel()
    body = json.dumps({"code": "flood 8000000"}).encode()
    with wire.connect(gw, 60) as s:
        s.sendall(req("POST", f"/api/kernels/{k}/execute", f"Content-Length: {len(body)}", body=body))
        time.sleep(1.0)
        status, h, text = wire.read_response(s)
    out = json.loads(text)
    assert status == 200 and len("".join(o["text"] for o in out["outputs"])) >= 8000000


# ---- the server about itself ----

def test_version_status_health(gw):
    assert set(gw.get("/api", token=None).json()) >= {"version"}
    s = gw.get("/api/status").json()
    assert set(s) == {"started", "last_activity", "kernels", "connections"}
    assert wire.ISO.fullmatch(s["started"]) and wire.ISO.fullmatch(s["last_activity"])
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE):
        wire.wait_for(lambda: gw.get("/api/status").json()["connections"] == 1)
        s = gw.get("/api/status").json()
        assert s["kernels"] == 1
    assert gw.get("/healthz", token=None).json() == {"status": "ok"}


def test_headers_of_api_replies(gw):
    for r in (gw.get("/api"), gw.get("/api/kernels"), gw.get("/nope"), gw.get("/api/kernels", token=None)):
        assert r.headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'self'; report-uri /api/security/csp-report; default-src 'none'" in \
            r.headers["Content-Security-Policy"]
    assert gw.call("POST", "/api/security/csp-report", token=None, data=b"{}").status_code == 204


def test_me(gw):
    me = gw.get("/api/me").json()
    assert me["identity"]["username"] == "alice" and me["identity"]["initials"] == "A"
    assert set(me["identity"]) == {"username", "name", "display_name", "initials", "avatar_url", "color"}
    asked = {"kernels": ["read", "write", "execute", "fly"], "contents": ["read"]}
    me = gw.get("/api/me", params={"permissions": json.dumps(asked)}).json()
    assert me["permissions"] == {"kernels": ["read", "write", "execute"], "contents": []}
    for bad in ("[]", "x", '{"kernels":1}', '{"kernels":[1]}', "null", '{"a":{}}'):
        check_error(gw.get("/api/me", params={"permissions": bad}), 400, "permissions")
    check_error(gw.call("PATCH", "/api/me", json={"name": "x"}), 403)


def test_sandboxes(gw):
    k = gw.kernel()
    boxes = gw.get("/api/sandboxes").json()
    assert len(boxes) == 1
    b = boxes[0]
    assert b["kernels"] == [k] and b["tier"] == "local" and b["template"] == "local"
    assert b["age_s"] >= 0 and b["timings"]["total_ms"] >= 0
    assert "pid" not in json.dumps(b)
    assert gw.model(k)["cellvisor"]["sandbox"] == b["id"]
    assert gw.get("/api/sandboxes", token=BOB).json() == []


def test_metrics(gw):
    gw.get("/api")
    r = gw.get("/metrics")
    assert r.status_code == 200 and r.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "cellvisor_http_requests_total" in r.text and "http_request_duration_seconds_bucket" in r.text


def test_metrics_can_be_open(fresh):
    g = fresh("--metrics-no-auth")
    assert g.get("/metrics", token=None).status_code == 200
    assert g.get("/api/status", token=None).status_code == 401


def test_the_root_page_says_what_this_is_and_no_secrets(gw):
    r = gw.get("/", token=None)
    assert r.headers["Content-Type"].startswith("text/html") and "Cellvisor" in r.text
    assert "default-src 'none'" in r.headers["Content-Security-Policy"]
    assert "alice" not in r.text


def test_a_web_dir_is_served_and_nothing_else(fresh, tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    web = tmp_path / "web"
    (web / "index.html").write_text("<title>console</title>")
    (web / "app.0123456789abcdef.js").write_text("1")
    (web / ".hidden").write_text("secret")
    (web / "link").symlink_to(tmp_path / "secret.txt")
    g = fresh("--web-dir", str(web))
    assert "console" in g.get("/", token=None).text
    r = g.get("/web/app.0123456789abcdef.js", token=None)
    assert r.status_code == 200 and "immutable" in r.headers["Cache-Control"]
    for path in ("/web/.hidden", "/web/link", "/web/../secret.txt", "/web/%2e%2e/secret.txt", "/web/..%2fsecret.txt",
                 "/web/nope", "/web/%2fetc%2fpasswd"):
        s, _, body = wire.exchange(g, req("GET", path))
        assert s in (404, 302) and b"secret" not in body.replace(b"secret.txt", b""), path


def test_too_many_connections_are_turned_away(fresh):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 5000:
        pytest.skip("descriptor limit of this machine is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (5000, hard))
    g = fresh()
    held = []
    try:
        for _ in range(2000):
            held.append(wire.connect(g))
        wire.wait_for(lambda: g.fds() >= 2000, 20, "all accepted")
        with wire.connect(g) as s:
            assert wire.read_response(s)[0] == 503
    finally:
        for s in held:
            s.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wire.wait_for(lambda: g.get("/api").status_code == 200, 20)


@pytest.mark.slow
def test_slow_heads_and_bodies_are_cut_off(gw):
    def drip(first):
        with wire.connect(gw, 60) as s:
            s.sendall(first)
            end = time.monotonic() + 45
            while time.monotonic() < end:
                try:
                    s.sendall(b"x")
                    s.settimeout(1)
                    if not s.recv(4096):
                        return
                except socket.timeout:
                    continue
                except OSError:
                    return
            failed.append(first)
    failed = []
    jobs = [threading.Thread(target=drip, args=(x,)) for x in (
        b"GET /api HTTP/1.1\r\nX: ", b"GE", req("POST", "/api/kernels", "Content-Length: 1000"),
        req("POST", "/api/kernels", "Transfer-Encoding: chunked", body=b"3e8\r\n"))]
    for j in jobs:
        j.start()
    for j in jobs:
        j.join()
    assert failed == []
