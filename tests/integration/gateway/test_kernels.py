"""/api/kernels: shapes, codes, wrong input."""
import concurrent.futures
import json
import socket
import urllib.parse
import uuid

import pytest
import wire
from conftest import ALICE, BOB, ODD_SPEC, PNG

GONE = "00000000-0000-4000-8000-000000000000"


def check_model(m):
    assert set(m) >= {"id", "name", "last_activity", "execution_state", "connections", "cellvisor"}
    assert wire.ISO.fullmatch(m["last_activity"])
    assert m["execution_state"] in ("starting", "idle", "busy", "restarting", "dead")
    assert isinstance(m["connections"], int)
    assert set(m["cellvisor"]) >= {"tier", "template", "sandbox", "reason"}
    assert m["cellvisor"]["tier"] == "local"


def check_error(r, status, *words):
    assert r.status_code == status, r.text
    body = r.json()
    assert isinstance(body["message"], str) and isinstance(body["reason"], str)
    assert "Traceback" not in r.text
    for w in words:
        assert w in body["message"], body["message"]


def test_life_of_a_kernel(gw):
    r = gw.post("/api/kernels", {"name": "echo"})
    assert r.status_code == 201
    m = r.json()
    check_model(m)
    assert r.headers["Location"] == f"/api/kernels/{m['id']}"
    assert r.headers["Content-Type"] == "application/json"
    assert uuid.UUID(m["id"]).version == 4
    one = gw.get(f"/api/kernels/{m['id']}")
    check_model(one.json())
    assert [k["id"] for k in gw.get("/api/kernels").json()] == [m["id"]]
    r = gw.post(f"/api/kernels/{m['id']}/interrupt", {})
    assert (r.status_code, r.content) == (204, b"")
    r = gw.post(f"/api/kernels/{m['id']}/restart", {})
    assert r.status_code == 200
    check_model(r.json())
    assert r.json()["id"] == m["id"]
    r = gw.call("DELETE", f"/api/kernels/{m['id']}")
    assert (r.status_code, r.content) == (204, b"")
    check_error(gw.get(f"/api/kernels/{m['id']}"), 404, f"Kernel does not exist: {m['id']}")
    check_error(gw.call("DELETE", f"/api/kernels/{m['id']}"), 404)
    assert gw.get("/api/kernels").json() == []


@pytest.mark.parametrize("body,headers", [
    (None, {}), (b"", {}), (b"", {"Content-Type": "application/json"}), (b"{}", {}), (b"  \r\n", {}),
    (b'{"name":null,"env":null,"kernel_id":null,"path":null}', {}), (b'{"name":""}', {}),
    (b'{"unknown":[1,2],"name":"echo"}', {"Content-Type": "text/plain"}),
])
def test_lenient_starts(gw, body, headers):
    r = gw.call("POST", "/api/kernels?1723000000000", data=body, headers=headers)
    assert r.status_code == 201, r.text


@pytest.mark.parametrize("body", [
    b"{", b"[]", b"null", b"1", b'"x"', b"{}{}", b'{"name":1}', b'{"name":["echo"]}', b'{"kernel_id":7}', b'{"env":[]}',
    b'{"env":{"A":1}}', b'{"env":{"A":null}}', b'{"path":{}}', b'{"cellvisor":[]}', b'{"cellvisor":{"tier":"xen"}}',
    b'{"cellvisor":{"tier":3}}', b"\xff\xfe", b'{"name":"a\x00"}', b'{"name":"echo","name":"echo"}',
    b"{" * 3000, b"[" * 100000, b'{"kernel_id":"../x"}', b'{"kernel_id":"a b"}', b'{"kernel_id":"x/../../y"}',
    b'{"kernel_id":"' + b"a" * 300 + b'"}', b'{"name":"' + b"n" * 5000 + b'","env":5}',
])
def test_bad_bodies_are_400(gw, body):
    check_error(gw.call("POST", "/api/kernels", data=body), 400)
    assert gw.get("/api/kernels").json() == []


def test_a_tier_above_what_there_is_is_refused(gw):
    r = gw.post("/api/kernels", {"name": "echo", "cellvisor": {"tier": "kvm"}})
    check_error(r, r.status_code, "tier")
    assert r.status_code in (403, 404)


def test_unknown_spec_names_what_exists(gw):
    check_error(gw.post("/api/kernels", {"name": "nope"}), 404, "nope", "echo")
    check_error(gw.post("/api/kernels", {"name": "../../etc/passwd"}), 404)


def test_a_kernel_that_fails_to_start_says_why(gw):
    r = gw.post("/api/kernels", {"name": "broken"})
    assert r.status_code >= 500
    check_error(r, r.status_code, "3")
    assert gw.get("/api/kernels").json() == []


def test_client_chosen_ids(gw):
    wanted = str(uuid.uuid4())
    r = gw.post("/api/kernels", {"name": "echo", "kernel_id": wanted})
    assert r.status_code == 201 and r.json()["id"] == wanted
    check_error(gw.post("/api/kernels", {"name": "echo", "kernel_id": wanted}), 409, wanted)
    # ... also while somebody else's: ids are global, but nothing is told about it.
    r = gw.post("/api/kernels", {"name": "echo", "kernel_id": wanted}, token=BOB)
    check_error(r, 409)
    assert "alice" not in r.text


def test_env_reaches_the_kernel(gw):
    k = gw.kernel(env={"KERNEL_USERNAME": "x y", "A_B": "ü$1"})
    assert gw.run(k, "env A_B")["outputs"][0]["data"]["text/plain"] == "ü$1"


@pytest.mark.parametrize("method,path", [
    ("GET", ""), ("DELETE", ""), ("POST", "/interrupt"), ("POST", "/restart"), ("POST", "/execute"),
])
@pytest.mark.parametrize("kernel", [GONE, "not-a-uuid", "a%20b", "x" * 200])
def test_unknown_kernels_are_404(gw, method, path, kernel):
    body = {"code": "1"} if path == "/execute" else None
    r = gw.call(method, f"/api/kernels/{kernel}{path}", json=body)
    check_error(r, 404, urllib.parse.unquote(kernel)[:50])


def test_others_kernels_do_not_exist(gw):
    k = gw.kernel()
    assert gw.get("/api/kernels", token=BOB).json() == []
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/interrupt"), ("POST", "/restart")):
        check_error(gw.call(method, f"/api/kernels/{k}{path}", token=BOB), 404, "Kernel does not exist")
    check_error(gw.post(f"/api/kernels/{k}/execute", {"code": "pid"}, token=BOB), 404)
    ws = wire.Kernel(gw, k, BOB)
    assert ws.status == 404
    assert gw.model(k)["execution_state"] == "idle"


def test_bodies_of_actions_are_ignored(gw):
    k = gw.kernel()
    for body in (b"", b"{}", b"not json", b"[]"):
        assert gw.call("POST", f"/api/kernels/{k}/interrupt", data=body).status_code == 204
    assert gw.call("POST", f"/api/kernels/{k}/restart", data=b"nonsense").status_code == 200
    assert gw.call("DELETE", f"/api/kernels/{k}", data=b'{"x":1}').status_code == 204


def test_an_interrupt_stops_the_code(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE) as ws:
        parent = ws.submit(wire.execute("sleep 60000"))
        wire.wait_for(lambda: gw.model(k)["execution_state"] == "busy")
        assert gw.post(f"/api/kernels/{k}/interrupt").status_code == 204
        out = ws.until_idle(parent)
    reply = [m for m in out if m["msg_type"] == "execute_reply"][0]["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")


def test_a_start_whose_client_leaves_is_undone(gw):
    with wire.connect(gw) as s:
        body = b'{"name":"slow"}'
        s.sendall(b"POST /api/kernels HTTP/1.1\r\nHost: localhost\r\nAuthorization: token " + ALICE.encode() +
                  b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wire.wait_for(lambda: len(gw.get("/api/kernels").json()) == 1)
        assert gw.get("/api/kernels").json()[0]["execution_state"] == "starting"
        s.shutdown(socket.SHUT_RDWR)
    wire.wait_for(lambda: gw.get("/api/kernels").json() == [], what="the start is undone")


def test_many_starts_at_once(gw):
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda _: gw.post("/api/kernels", {"name": "echo"}), range(10)))
    assert [r.status_code for r in replies] == [201] * 10
    assert len({r.json()["id"] for r in replies}) == 10


def test_kernel_limits_answer_403(fresh):
    g = fresh("--max-kernels", "2", "--max-kernels-per-principal", "1")
    assert g.post("/api/kernels", {"name": "echo"}).status_code == 201
    check_error(g.post("/api/kernels", {"name": "echo"}), 403)
    assert g.post("/api/kernels", {"name": "echo"}, token=BOB).status_code == 201


# ---- kernelspecs ----

def test_specs_have_the_shape_that_clients_check(gw):
    r = gw.get("/api/kernelspecs?user=me&_=1")
    assert r.status_code == 200
    all_ = r.json()
    assert all_["default"] in all_["kernelspecs"]
    for name, e in all_["kernelspecs"].items():
        assert e["name"] == name
        assert isinstance(e["spec"]["argv"], list)
        assert isinstance(e["spec"]["language"], str) and isinstance(e["spec"]["display_name"], str)
        assert isinstance(e["resources"], dict)
        assert gw.get("/api/kernelspecs/" + urllib.parse.quote(name)).json() == e


def test_odd_spec_names_are_decoded_once(gw):
    r = gw.get("/api/kernelspecs/" + urllib.parse.quote(ODD_SPEC))
    assert r.status_code == 200 and r.json()["name"] == ODD_SPEC
    k = gw.post("/api/kernels", {"name": ODD_SPEC})
    assert k.status_code == 201 and k.json()["name"] == ODD_SPEC
    for bad, want in (("echo%2Fx", 404), ("..%2f..%2fx", 404), ("%2e%2e", 404), ("%2E", 404), ("echo%252e", 404),
                      ("nope", 404), ("a%0ab", 404), ("%00x", 400), ("%zz", 400), ("%e9", 404)):
        status, _, body = wire.exchange(gw, f"GET /api/kernelspecs/{bad} HTTP/1.1\r\nHost: localhost\r\n"
                                        f"Authorization: token {ALICE}\r\n\r\n".encode())
        assert status == want, bad
        assert set(json.loads(body)) == {"message", "reason"}


def test_resources_are_served_with_their_types(gw):
    for name in ("echo", ODD_SPEC):
        e = gw.get("/api/kernelspecs/" + urllib.parse.quote(name)).json()
        assert set(e["resources"]) == {"logo-64x64", "logo-svg", "kernel.js"}
        r = gw.get(e["resources"]["logo-64x64"])
        assert (r.status_code, r.headers["Content-Type"], r.content) == (200, "image/png", PNG)
        assert "max-age" in r.headers["Cache-Control"]
        r = gw.get(e["resources"]["logo-svg"])
        assert r.headers["Content-Type"] == "image/svg+xml" and "sandbox" in r.headers["Content-Security-Policy"]
        assert gw.get(e["resources"]["kernel.js"]).headers["Content-Type"].startswith("text/javascript")
        h = gw.call("HEAD", e["resources"]["logo-64x64"])
        assert (h.status_code, h.headers["Content-Length"], h.content) == (200, str(len(PNG)), b"")


@pytest.mark.parametrize("path", ["echo/nope.png", "nope/logo-64x64.png", "echo/..%2f..%2fkernel.js",
                                  "echo/sub/kernel.js", "echo/%2e%2e/%2e%2e/kernel.json", "..%2f..%2fetc/passwd", "echo/%2fetc%2fpasswd"])
def test_resources_lead_nowhere_else(gw, path):
    s, _, body = wire.exchange(gw, f"GET /kernelspecs/{path} HTTP/1.1\r\nHost: localhost\r\n"
                               f"Authorization: token {ALICE}\r\nConnection: close\r\n\r\n".encode())
    assert s == 404
    assert set(json.loads(body)) == {"message", "reason"}


@pytest.mark.parametrize("base", ["", "/", "gw", "/gw", "/gw/", "/a/b"])
def test_every_path_we_emit_carries_the_base_url(fresh, base):
    g = fresh("--base-url", base)
    prefix = "/" + base.strip("/")
    root = g.url[:len(g.url) - len(prefix.rstrip("/"))] if prefix != "/" else g.url
    assert urllib.parse.urlsplit(g.url).path == prefix.rstrip("/")
    for e in g.get("/api/kernelspecs").json()["kernelspecs"].values():
        for url in e["resources"].values():
            assert url.startswith(prefix.rstrip("/") + "/kernelspecs/")
            r = g.session.get(root + url, headers={"Authorization": f"token {ALICE}"}, timeout=10)
            assert r.status_code == 200
    r = g.post("/api/kernels", {"name": "echo"})
    assert r.headers["Location"] == f"{prefix.rstrip('/')}/api/kernels/{r.json()['id']}"
    with wire.Kernel(g, r.json()["id"], ALICE) as ws:
        assert ws.status == 101
    s = g.post("/api/sessions", {"path": "x.ipynb", "type": "notebook", "kernel": {"name": "echo"}})
    assert s.headers["Location"] == f"{prefix.rstrip('/')}/api/sessions/{s.json()['id']}"
    if prefix != "/":
        for path in ("/api", "/api/kernels", prefix + "x/api"):
            check_error(g.session.get(root + path, timeout=10), 404)
        assert g.session.get(root + prefix, timeout=10).status_code == 200
