"""Section F: interrupts, asyncio, what an interrupted cell leaves behind."""
import json
import time

from casekit import ALICE, Client, check_end, reply, state, stdout, within
import wire
from wire import wait_for


def running(ws, request):
    ws.until(lambda m: m["msg_type"] == "execute_input" and m["parent_header"]["msg_id"] == request)
    ws.during(0.5)


def test_case_60_interrupt_over_rest(gw, py, ws):
    ws.run("kept=42")
    request = ws.execute("import time;time.sleep(30)")
    running(ws, request)
    with within(1):
        assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
        out = ws.done(request)
    assert check_end(out)["ename"] == "KeyboardInterrupt"
    assert ws.value("kept") == "42"


def test_case_60_interrupt_over_the_control_channel(gw, ws):
    ws.run("kept=42")
    request = ws.execute("import time;time.sleep(30)")
    running(ws, request)
    with within(1):
        asked = ws.ask("interrupt_request", channel="control")
        ws.done(request, asked)
    assert reply(ws.of(asked))["status"] == "ok"
    assert check_end(ws.of(request))["ename"] == "KeyboardInterrupt"
    assert ws.value("kept") == "42"


def test_case_60_an_interrupt_of_an_idle_kernel_hurts_nobody(gw, py, ws):
    for _ in range(3):
        assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
    assert ws.value("1") == "1"


def test_case_62_children_end_with_the_interrupted_cell(gw, py, ws):
    """The length of the sleep tells ours from others on this machine."""
    request = ws.execute("import subprocess;subprocess.run('sleep 98765 & sleep 98765; wait',shell=True)")
    running(ws, request)
    with within(1):
        assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
        out = ws.done(request)
    assert reply(out)["ename"] == "KeyboardInterrupt"
    wait_for(lambda: stdout(ws.run("!pgrep -fc '[s]leep 98765' || true")).strip() == "0", 5, "no child is left")


def test_case_63_native_code_is_busy_until_it_returns(gw, py, ws):
    """204 means sent. A restart is the way out, and the pending request ends with it. (The pause lets ipykernel's own
    thread say busy: it needs the interpreter's lock.)"""
    request = ws.execute("import time;time.sleep(.1)\nsum(range(10**12))")
    running(ws, request)
    assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
    ws.during(1)
    assert gw.model(py)["execution_state"] == "busy"
    assert gw.post(f"/api/kernels/{py}/restart").status_code == 200
    out = ws.done(request)
    assert check_end(out)["ename"] == "DeadKernelError"
    assert ws.value("1") == "1"


def test_case_64_an_await_is_interrupted(gw, py, ws):
    request = ws.execute("import asyncio\nawait asyncio.sleep(60)")
    running(ws, request)
    assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
    out = ws.done(request)
    assert check_end(out)["ename"] in ("KeyboardInterrupt", "CancelledError")
    assert ws.value("1") == "1"


def test_case_65_asyncio_run_and_top_level_await(gw, ws):
    out = ws.run("import asyncio\nasync def f(): return 7\nasyncio.run(f())")
    error = check_end(out)
    if error["status"] == "error":  # newer ipykernel may allow it
        assert error["ename"] == "RuntimeError" and "running event loop" in error["evalue"]
    assert ws.value("await f()") == "7"


def test_case_66_a_rest_client_that_leaves_stops_its_code(gw, py):
    body = json.dumps({"code": "import time;time.sleep(60)"})
    with wire.connect(gw) as s:
        s.sendall(f"POST /api/kernels/{py}/execute HTTP/1.1\r\nHost: localhost\r\nAuthorization: token {ALICE}\r\n"
                  f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(lambda: gw.model(py)["execution_state"] == "busy", 10)
    with within(2):
        # A request that comes while the old one is being stopped is not taken down with it.
        result = gw.run(py, "1")
    assert result["status"] == "ok" and result["outputs"][0]["data"]["text/plain"] == "1"


def test_case_66_a_websocket_that_leaves_stops_nothing(gw, py):
    ws = Client(gw, py, session="leaver")
    request = ws.execute("import time;time.sleep(3);print('done')")
    ws.until(lambda m: state(m) == "busy")
    ws.abort()
    time.sleep(0.5)
    assert gw.model(py)["execution_state"] == "busy"
    with Client(gw, py, session="leaver") as back:
        out = back.done(request)
        assert stdout(out) == "done\n" and reply(out)["status"] == "ok"


def test_case_124_a_time_limit_is_exact_and_keeps_what_came(gw, py):
    gw.run(py, "kept=42")
    begin = time.monotonic()
    result = gw.run(py, "print('p',flush=True);import time;time.sleep(60)", timeout=3)
    took = time.monotonic() - begin
    assert 3.0 <= took < 3.5 * 3
    assert result["status"] == "timeout" and result["error"]["ename"] == "Timeout"
    assert result["outputs"][0]["text"] == "p\n"
    wait_for(lambda: gw.model(py)["execution_state"] == "idle", 3)
    assert gw.run(py, "kept")["outputs"][0]["data"]["text/plain"] == "42"
    assert gw.run(py, "import time;time.sleep(.3)", timeout=0)["status"] == "ok"
