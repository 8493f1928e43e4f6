"""POST /api/kernels/{id}/execute (cases 42, 66, 124, 125)."""
import concurrent.futures
import time

import pytest
import wire
from conftest import ALICE
from test_http import req
from test_kernels import check_error


def test_a_result_has_everything(gw):
    k = gw.kernel()
    r = gw.run(k, "print hello\nwarn careful\ndisplay 10\necho 42")
    assert (r["status"], r["execution_count"], r["error"]) == ("ok", 1, None)
    kinds = [o["output_type"] for o in r["outputs"]]
    assert kinds == ["stream", "stream", "display_data", "execute_result"]
    assert r["outputs"][0] == {"output_type": "stream", "name": "stdout", "text": "hello\n"}
    assert r["outputs"][3]["data"] == {"text/plain": "42"}
    assert r["truncated_bytes"] == 0 and r["timing"]["run_ms"] >= 0 and r["id"]


def test_an_error_is_a_result_too(gw):
    k = gw.kernel()
    r = gw.run(k, "print before\nerror bad thing")
    assert r["status"] == "error"
    assert (r["error"]["ename"], r["error"]["evalue"]) == ("EchoError", "bad thing")
    assert [o["output_type"] for o in r["outputs"]] == ["stream", "error"]


def test_input_is_refused_at_once(gw):
    k = gw.kernel()
    begin = time.monotonic()
    r = gw.run(k, "input name?")
    assert r["status"] == "error" and "Stdin" in r["error"]["ename"]
    assert time.monotonic() - begin < 5


def test_timeout_interrupts_and_keeps_what_came(gw):
    k = gw.kernel()
    begin = time.monotonic()
    r = gw.run(k, "print p\nsleep 60000", timeout=1)
    assert 0.9 < time.monotonic() - begin < 5
    assert r["status"] == "timeout" and r["outputs"][0]["text"] == "p\n"
    assert r["error"]["ename"] == "Timeout"
    assert gw.run(k, "echo again")["status"] == "ok"
    assert gw.run(k, "sleep 50", timeout=0)["status"] == "ok"
    assert gw.run(k, "echo 1", timeout=0.5)["status"] == "ok"


@pytest.mark.parametrize("body,word", [
    ({}, "code"), ({"code": None}, "code"), ({"code": 1}, "code"), ({"code": ["x"]}, "code"),
    ({"code": "x", "timeout": "5"}, "timeout"), ({"code": "x", "timeout": -1}, "timeout"),
    ({"code": "x", "timeout": 1e12}, "timeout"), ({"code": "x", "silent": 1}, "silent"),
    ({"code": "x", "store_history": "yes"}, "store_history"), ({"code": "x", "stop_on_error": []}, "stop_on_error"),
    ({"code": "x", "time_out": 1}, "timeout"), ({"code": "x", "bogus": 1}, "bogus"),
])
def test_bad_bodies_are_400(gw, body, word):
    k = gw.kernel()
    check_error(gw.post(f"/api/kernels/{k}/execute", body), 400, word)
    assert gw.run(k, "echo 1")["execution_count"] == 1


def test_text_that_is_no_json_is_400(gw):
    k = gw.kernel()
    for data in (b"{", b"[]", b"echo 1", b'{"code":"\xff"}', b""):
        check_error(gw.call("POST", f"/api/kernels/{k}/execute", data=data), 400)


def test_silent_runs_do_not_count(gw):
    k = gw.kernel()
    gw.run(k, "print x", silent=True)
    assert gw.run(k, "echo 1")["execution_count"] == 1


def test_a_client_that_leaves_stops_its_code(gw):
    k = gw.kernel()
    body = b'{"code":"sleep 60000"}'
    with wire.connect(gw) as s:
        s.sendall(req("POST", f"/api/kernels/{k}/execute", f"Content-Length: {len(body)}", body=body))
        wire.wait_for(lambda: gw.model(k)["execution_state"] == "busy")
    begin = time.monotonic()
    r = gw.run(k, "echo 1")
    assert r["status"] in ("ok", "aborted") and time.monotonic() - begin < 2
    assert gw.run(k, "echo 2")["status"] == "ok"


def test_a_websocket_that_leaves_does_not(gw):
    k = gw.kernel()
    ws = wire.Kernel(gw, k, ALICE, session="leaver")
    parent = ws.submit(wire.execute("sleep 1500\nprint done", "leaver"))
    wire.wait_for(lambda: gw.model(k)["execution_state"] == "busy")
    ws.abort()
    time.sleep(0.5)
    assert gw.model(k)["execution_state"] == "busy"
    with wire.Kernel(gw, k, ALICE, session="leaver") as ws:
        out = ws.until_idle(parent)
    assert wire.text_of([m for m in out if m["parent_header"].get("msg_id") == parent]) == "done\n"


@pytest.mark.parametrize("code", ["exit 7", "segv"])
def test_a_dying_kernel_ends_the_request(gw, code):
    k = gw.kernel()
    # A moment for the words to leave the process: what its ZMQ thread has not written dies with it.
    r = gw.run(k, f"print last words\nsleep 200\n{code}")
    assert r["status"] in ("dead", "error") and r["error"]
    assert any(o.get("text") == "last words\n" for o in r["outputs"])


def test_deleting_the_kernel_ends_the_request(gw):
    k = gw.kernel()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(gw.post, f"/api/kernels/{k}/execute", {"code": "sleep 60000"})
        wire.wait_for(lambda: gw.model(k)["execution_state"] == "busy")
        assert gw.call("DELETE", f"/api/kernels/{k}").status_code == 204
        r = job.result(10)
    assert r.status_code in (200, 409, 410)
    if r.status_code == 200:
        assert r.json()["status"] == "dead"


def test_restarting_the_kernel_ends_the_request(gw):
    k = gw.kernel()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(gw.post, f"/api/kernels/{k}/execute", {"code": "sleep 60000"})
        wire.wait_for(lambda: gw.model(k)["execution_state"] == "busy")
        assert gw.post(f"/api/kernels/{k}/restart").status_code == 200
        r = job.result(10)
    assert r.status_code == 200 and r.json()["status"] in ("dead", "error", "aborted")
    assert gw.run(k, "echo 1")["execution_count"] == 1


def test_many_short_runs_in_parallel(gw):
    kernels = [gw.kernel() for _ in range(5)]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        out = list(pool.map(lambda i: gw.run(kernels[i % 5], f"echo {i}"), range(200)))
    for i, r in enumerate(out):
        assert r["outputs"][0]["data"]["text/plain"] == str(i)


def test_code_is_passed_byte_for_byte(gw):
    k = gw.kernel()
    for text in ("ü – 日本 🎉", "\"quotes\" \\ back", "tab\there"):
        assert gw.run(k, f"echo {text}")["outputs"][0]["data"]["text/plain"] == text
