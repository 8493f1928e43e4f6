"""Section M: start, restart, death."""
import concurrent.futures
import json
import os
import signal
import time
import uuid

import psutil
import pytest
import requests
from casekit import ALICE, Client, check_end, reply, state, states, stdout, within
from wire import wait_for

DEATHS = [("import os;os._exit(7)", "exit code 7"), ("import ctypes;ctypes.string_at(0)", "SIGSEGV"),
          ("import os;os.kill(os.getpid(),9)", "SIGKILL")]


# What a kernel has given to its ZMQ thread but that thread has not written yet dies with the process, in any
# Jupyter stack; what was written must arrive. So it lives a moment after its flush.
LAST_WORDS = "import time\nprint('last words',flush=True)\ntime.sleep(.2)\n"


@pytest.mark.parametrize("code,word", DEATHS, ids=[w for _, w in DEATHS])
def test_case_110_a_dying_kernel_ends_every_open_request(gw, py, ws, code, word):
    a, b = ws.execute(LAST_WORDS + code), ws.execute("print('queued')")
    with within(2):
        ws.done(a, b)
    for request in (a, b):
        error = check_end(ws.of(request))
        assert error["status"] == "error" and error["ename"] == "DeadKernelError" and word in error["evalue"]
    assert stdout(ws.all) == "last words\n"
    if not {"restarting", "dead"} & set(states(ws.all)):
        ws.until(lambda m: state(m) in ("restarting", "dead"))
    wait_for(lambda: gw.model(py)["execution_state"] == "idle", 20, "a fresh kernel")
    assert ws.value("1") == "1"


@pytest.mark.parametrize("code,word", DEATHS[:1] + DEATHS[2:], ids=["exit", "kill"])
def test_case_110_a_rest_call_returns_too(gw, py, code, word):
    with within(3):
        result = gw.run(py, LAST_WORDS + code)
    assert result["status"] == "dead" and result["error"]["ename"] == "DeadKernelError"
    assert word in result["error"]["evalue"] and result["outputs"][0]["text"] == "last words\n"


def test_case_112_a_death_in_the_background_does_not_leave_it_busy(gw, py):
    pid = int(gw.run(py, "import os;os.getpid()")["outputs"][0]["data"]["text/plain"])
    ws = Client(gw, py)
    ws.execute("while True: pass")
    ws.until(lambda m: state(m) == "busy")
    ws.close()
    wait_for(lambda: gw.model(py)["connections"] == 0)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gw.model(py)["execution_state"] in ("idle", "dead"), 10, "no longer busy")
    assert gw.model(py)["connections"] == 0
    assert gw.run(py, "1")["status"] == "ok"


def test_case_112_a_kernel_that_keeps_dying_is_dead_and_says_why(fresh):
    g = fresh("--restart-limit", "2")
    k = g.kernel()
    for _ in range(3):
        assert g.run(k, "exit 9")["status"] == "dead"
        wait_for(lambda: g.model(k)["execution_state"] in ("idle", "dead"), 10)
    model = g.model(k)
    assert model["execution_state"] == "dead" and "exit code 9" in model["reason"]
    with Client(g, k) as ws:
        error = reply(ws.run("echo 1"))
        assert error["ename"] == "DeadKernelError" and "restart" in error["evalue"]
        assert g.post(f"/api/kernels/{k}/restart").status_code == 200
        assert ws.value("echo 1") == "1"


@pytest.fixture(scope="session")
def false_spec(specs):
    path = specs / "kernels" / "false"
    path.mkdir()
    (path / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "f", "language": "x"}))


def children(pid):
    """Names of a process's descendants."""
    for p in psutil.Process(pid).children(recursive=True):
        try:
            yield p.name()
        except psutil.NoSuchProcess:
            pass


def test_case_115_a_kernel_that_ends_while_it_starts(false_spec, fresh):
    g = fresh()
    for name, word in (("false", "exit code 1"), ("broken", "exit code 3")):
        with within(10):
            r = g.post("/api/kernels", {"name": name})
        assert 500 <= r.status_code < 600 and word in r.json()["message"] and "Traceback" not in r.text
    assert g.get("/api/kernels").json() == []
    text = g.log()  # every sandbox of a failed start is told to end; the pool's own are not
    assert text.count("start failed") == 2
    wait_for(lambda: not {"false", "cv-echo-kernel"} & set(children(g.pid)), 5, "no process is left")


def test_case_116_a_start_whose_client_left_is_undone(gw):
    before = len(gw.get("/api/kernels").json())
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{gw.url}/api/kernels", json={"name": "slow"}, headers={"Authorization": f"token {ALICE}"},
                      timeout=0.3)
    k = gw.kernel(name="slow")
    time.sleep(2)
    assert [x["id"] for x in gw.get("/api/kernels").json()[before:]] == [k]


def test_case_116_a_wanted_id_makes_the_start_idempotent(gw):
    """The client's key is the kernel's id: repeating the start never makes a second kernel."""
    wanted = str(uuid.uuid4())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: gw.post("/api/kernels", {"name": "slow", "kernel_id": wanted}).status_code,
                              range(4)))
    assert sorted(codes) == [201, 409, 409, 409]
    assert [x["id"] for x in gw.get("/api/kernels").json()] == [wanted]


@pytest.mark.parametrize("name,times", [("echo", 40), ("python3", 3)])
def test_case_118_busy_and_idle_right_after_a_restart(gw, name, times):
    """43 of the 200 restarts."""
    k = gw.kernel(name=name)
    for i in range(times):
        assert gw.post(f"/api/kernels/{k}/restart").status_code == 200
        with Client(gw, k, session=f"s{i}") as ws:
            out = ws.done(ws.ask("kernel_info_request"))
            assert check_end(out)["status"] == "ok"


def test_case_118_a_request_during_the_restart_waits_for_the_new_kernel(gw, py, ws):
    ws.run("old=1")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        restart = pool.submit(gw.post, f"/api/kernels/{py}/restart")
        ws.until(lambda m: state(m) in ("restarting", "starting"))
        request = ws.execute("'old' in globals()")
        out = ws.done(request)
        assert restart.result(20).status_code == 200
    values = [m["content"]["data"]["text/plain"] for m in out if m["msg_type"] == "execute_result"]
    assert values == ["False"] and check_end(out)["execution_count"] == 1
