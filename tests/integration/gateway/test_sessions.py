"""/api/sessions (cases 139, 141, 142, 144)."""
import concurrent.futures
import uuid

import pytest
import wire
from conftest import BOB
from test_kernels import check_error, check_model


@pytest.fixture(autouse=True)
def no_sessions_left(gw):
    yield
    for token in (None, BOB):
        kw = {"token": token} if token else {}
        for s in gw.get("/api/sessions", **kw).json():
            gw.call("DELETE", f"/api/sessions/{s['id']}", **kw)


def create(gw, path="a.ipynb", **body):
    r = gw.post("/api/sessions", {"path": path, "type": "notebook", "kernel": {"name": "echo"}, **body})
    assert r.status_code == 201, r.text
    return r.json()


def test_life_of_a_session(gw):
    r = gw.post("/api/sessions", {"path": "d/a.ipynb", "type": "notebook", "name": "A", "kernel": {"name": "echo"}})
    assert r.status_code == 201
    s = r.json()
    assert r.headers["Location"] == f"/api/sessions/{s['id']}"
    assert (s["path"], s["name"], s["type"]) == ("d/a.ipynb", "A", "notebook")
    assert s["notebook"] == {"path": "d/a.ipynb", "name": "A"}
    check_model(s["kernel"])
    assert gw.get(f"/api/sessions/{s['id']}").json()["id"] == s["id"]
    assert [x["id"] for x in gw.get("/api/sessions").json()] == [s["id"]]
    assert gw.get(f"/api/kernels/{s['kernel']['id']}").status_code == 200
    r = gw.call("DELETE", f"/api/sessions/{s['id']}")
    assert (r.status_code, r.content) == (204, b"")
    check_error(gw.get(f"/api/sessions/{s['id']}"), 404)
    check_error(gw.call("DELETE", f"/api/sessions/{s['id']}"), 404)
    check_error(gw.get(f"/api/kernels/{s['kernel']['id']}"), 404)


def test_the_same_path_gives_the_same_session(gw):
    a, b = create(gw), create(gw)
    assert a["id"] == b["id"] and a["kernel"]["id"] == b["kernel"]["id"]
    other = gw.post("/api/sessions", {"path": "a.ipynb", "type": "notebook", "kernel": {"name": "echo"}}, token=BOB)
    assert other.status_code == 201 and other.json()["id"] != a["id"]


def test_parallel_creations_share_one_kernel(gw):
    body = {"path": "race.ipynb", "type": "notebook", "kernel": {"name": "slow"}}
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: gw.post("/api/sessions", body), range(20)))
    assert [r.status_code for r in replies] == [201] * 20
    assert len({r.json()["id"] for r in replies}) == 1
    assert len({r.json()["kernel"]["id"] for r in replies}) == 1
    assert len(gw.get("/api/kernels").json()) == 1 and len(gw.get("/api/sessions").json()) == 1


def test_the_legacy_body_is_taken(gw):
    for nb, want in (({"path": "old.ipynb"}, "old.ipynb"), ({"name": "older.ipynb"}, "older.ipynb")):
        r = gw.post("/api/sessions", {"notebook": nb, "kernel": {"name": "echo"}})
        assert r.status_code == 201 and r.json()["path"] == want and r.json()["type"] == "notebook"


@pytest.mark.parametrize("body,words", [
    ({}, ["Missing field in JSON data: path"]), ({"type": "notebook"}, ["path"]),
    ({"path": "x"}, ["Missing field in JSON data: type"]), ({"path": "", "type": "notebook"}, ["path"]),
    ({"path": 1, "type": "notebook"}, ["path"]), ({"path": "x", "type": []}, ["type"]),
    ({"path": "x", "type": "notebook", "kernel": []}, ["kernel"]),
    ({"path": "x", "type": "notebook", "kernel": {"name": 1}}, ["kernel.name"]),
    ({"path": "x", "type": "notebook", "kernel": {"id": {}}}, ["kernel.id"]),
    ({"path": "x", "type": "notebook", "name": 5}, ["name"]),
    ({"path": "x", "type": "notebook", "env": {"A": 1}}, ["env"]), ({"notebook": "x"}, ["notebook"]),
    ({"notebook": {"path": 3}}, ["notebook.path"]), ({"path": "x", "type": "n", "kernel": {"id": "../x"}}, []),
])
def test_bad_creations_are_400(gw, body, words):
    check_error(gw.post("/api/sessions", body), 400, *words)
    assert gw.get("/api/sessions").json() == [] and gw.get("/api/kernels").json() == []


def test_text_that_is_no_json_is_400(gw):
    for data in (b"{", b"[]", b"x", b"\xff"):
        check_error(gw.call("POST", "/api/sessions", data=data), 400, "Invalid JSON in body of request")


def test_an_unknown_spec_is_501_with_a_short_message(gw):
    r = gw.post("/api/sessions", {"path": "x", "type": "notebook", "kernel": {"name": "nope"}})
    check_error(r, 501, "nope")
    assert "nope" in r.json()["short_message"]
    assert gw.get("/api/sessions").json() == []


def test_a_kernel_that_does_not_start_leaves_no_session(gw):
    r = gw.post("/api/sessions", {"path": "x", "type": "notebook", "kernel": {"name": "broken"}})
    check_error(r, r.status_code)
    assert r.status_code >= 500
    assert gw.get("/api/sessions").json() == [] and gw.get("/api/kernels").json() == []


def test_attaching_to_a_kernel_by_id(gw):
    k = gw.kernel()
    s = create(gw, kernel={"id": k})
    assert s["kernel"]["id"] == k
    mine = str(uuid.uuid4())
    assert create(gw, path="b.ipynb", kernel={"id": mine, "name": "echo"})["kernel"]["id"] == mine


def test_a_shared_kernel_lives_until_its_last_session(gw):
    a = create(gw)
    b = create(gw, path="console-1", type="console", kernel={"id": a["kernel"]["id"]})
    assert "notebook" not in b
    gw.call("DELETE", f"/api/sessions/{b['id']}")
    assert gw.get(f"/api/kernels/{a['kernel']['id']}").status_code == 200
    assert gw.get(f"/api/sessions/{a['id']}").status_code == 200
    gw.call("DELETE", f"/api/sessions/{a['id']}")
    assert gw.get(f"/api/kernels/{a['kernel']['id']}").status_code == 404


def test_patch_changes_what_is_given(gw):
    s = create(gw)
    url = f"/api/sessions/{s['id']}"
    r = gw.call("PATCH", url, json={})
    assert r.status_code == 200 and r.json()["kernel"]["id"] == s["kernel"]["id"]
    r = gw.call("PATCH", url, json={"path": "n.ipynb"})
    assert r.json()["path"] == "n.ipynb" and r.json()["name"] == s["name"]
    r = gw.call("PATCH", url, json={"name": "r", "type": "console"})
    assert (r.json()["name"], r.json()["type"]) == ("r", "console")
    r = gw.call("PATCH", url, json={"kernel": {"name": "echo"}})
    assert r.status_code == 200 and r.json()["kernel"]["id"] != s["kernel"]["id"]
    check_error(gw.get(f"/api/kernels/{s['kernel']['id']}"), 404)
    now = r.json()["kernel"]["id"]
    check_error(gw.call("PATCH", url, json={"kernel": {"id": str(uuid.uuid4())}}), 400)
    k = gw.kernel()
    r = gw.call("PATCH", url, json={"kernel": {"id": k, "name": "ignored"}})
    assert r.status_code == 200 and r.json()["kernel"]["id"] == k
    check_error(gw.get(f"/api/kernels/{now}"), 404)
    assert gw.get("/api/sessions").status_code == 200


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"path":1}', b'{"kernel":"x"}', b'{"kernel":{"id":1}}'])
def test_bad_patches_are_400_and_change_nothing(gw, data):
    s = create(gw)
    check_error(gw.call("PATCH", f"/api/sessions/{s['id']}", data=data), 400)
    assert gw.get(f"/api/sessions/{s['id']}").json()["path"] == s["path"]


def test_a_patch_to_an_unknown_spec_keeps_the_old_kernel(gw):
    s = create(gw)
    r = gw.call("PATCH", f"/api/sessions/{s['id']}", json={"kernel": {"name": "nope"}})
    check_error(r, 501, "nope")
    assert gw.get(f"/api/sessions/{s['id']}").json()["kernel"]["id"] == s["kernel"]["id"]


def test_a_session_whose_kernel_is_gone_says_410_once(gw):
    s = create(gw)
    gw.call("DELETE", f"/api/kernels/{s['kernel']['id']}")
    assert gw.get("/api/sessions").json() == []
    r = gw.call("DELETE", f"/api/sessions/{s['id']}")
    assert r.status_code in (404, 410)
    check_error(gw.call("DELETE", f"/api/sessions/{s['id']}"), 404)


def test_sessions_of_others_are_not_there(gw):
    s = create(gw)
    url = f"/api/sessions/{s['id']}"
    assert gw.get("/api/sessions", token=BOB).json() == []
    check_error(gw.get(url, token=BOB), 404)
    check_error(gw.call("PATCH", url, json={"name": "x"}, token=BOB), 404)
    check_error(gw.call("DELETE", url, token=BOB), 404)
    r = gw.post("/api/sessions", {"path": "m", "type": "notebook", "kernel": {"id": s["kernel"]["id"]}}, token=BOB)
    assert r.status_code in (403, 404, 409, 501), r.text


def test_a_creation_whose_client_leaves_is_undone(gw):
    body = b'{"path":"left.ipynb","type":"notebook","kernel":{"name":"slow"}}'
    with wire.connect(gw) as s:
        from conftest import ALICE
        s.sendall(b"POST /api/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: token " + ALICE.encode() +
                  b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wire.wait_for(lambda: len(gw.get("/api/kernels").json()) == 1)
    wire.wait_for(lambda: gw.get("/api/kernels").json() == [], what="the start is undone")
    assert gw.get("/api/sessions").json() == []
