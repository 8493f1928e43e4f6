"""Section A: order, the idle, aborts."""
import pytest
import wire
from casekit import Client, check_end, reply, state, states, stdout, types

BOTH = pytest.mark.parametrize("v1", [False, True], ids=["legacy", "v1"])


def test_case_01_all_output_comes_before_the_idle(gw, ws):
    """20 of the 200 runs; the delays of the link are those of tests/sim."""
    want = "".join(f"{i}\n" for i in range(300))
    asked = []
    for _ in range(20):
        asked.append(ws.execute("for i in range(300): print(i, flush=True)\n'last'"))
        out = ws.done(asked[-1])
        check_end(out)
        assert stdout(out) == want
        assert [m["content"]["data"]["text/plain"] for m in out if m["msg_type"] == "execute_result"] == ["'last'"]
    ws.during(0.5)
    for request in asked:
        iopub = [m for m in ws.of(request) if m["channel"] == "iopub"]
        assert state(iopub[-1]) == "idle"


@BOTH
def test_case_02_replies_keep_the_order_of_the_requests(gw, py, v1):
    """5 x 40 of the 5 x 500 requests, v1 frames in between with buffers."""
    with Client(gw, py, v1=v1) as ws:
        first = reply(ws.run("0"))["execution_count"]
        sent = []
        for _ in range(40):
            sent += [ws.execute("1"), ws.ask("comm_info_request"), ws.execute("2"), ws.ask("kernel_info_request"),
                     ws.execute("3")]
        out = ws.done(*sent)
    replies = [m for m in out if m["channel"] == "shell"]
    assert [m["parent_header"]["msg_id"] for m in replies] == sent
    counts = [m["content"]["execution_count"] for m in replies if m["msg_type"] == "execute_reply"]
    assert counts == list(range(first + 1, first + 1 + 3 * 40))
    want = ["execute_reply", "comm_info_reply", "execute_reply", "kernel_info_reply", "execute_reply"] * 40
    assert types(replies) == want


def test_case_04_what_is_queued_behind_a_failing_cell_is_aborted(gw, ws):
    a = ws.execute("import time;time.sleep(.5);1/0")
    b, c = ws.execute("print('B')"), ws.execute("print('C')")
    ws.done(a, b, c)
    assert check_end(ws.of(a))["ename"] == "ZeroDivisionError"
    for request in (b, c):
        assert check_end(ws.of(request))["status"] == "aborted"
        assert stdout(ws.of(request)) == ""
    assert ws.value("5") == "5"


def test_case_04_a_cell_that_may_fail_aborts_nobody(gw, ws):
    a = ws.execute("import time;time.sleep(.3);1/0", stop_on_error=False)
    b = ws.execute("print('B')")
    out = ws.done(a, b)
    assert reply(out, a)["status"] == "error" and reply(out, b)["status"] == "ok"
    assert stdout(ws.of(b)) == "B\n"


def test_case_05_an_interrupt_aborts_the_queue(gw, py, ws):
    a = ws.execute("while True: pass")
    b = ws.execute("print('must not run')")
    ws.until(lambda m: state(m) == "busy" and m["parent_header"]["msg_id"] == a)
    assert ws.during(1) is not None
    assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
    out = ws.done(a, b)
    assert reply(out, a)["ename"] == "KeyboardInterrupt"
    assert reply(out, b)["status"] == "aborted"
    assert "must not run" not in stdout(ws.all)
    assert states(ws.of(b)) == ["busy", "idle"]


def test_case_07_help_is_in_the_payload(gw, py, ws):
    out = ws.run("len?")
    (page,) = check_end(out)["payload"]
    assert page["source"] == "page" and "Docstring" in page["data"]["text/plain"]
    (following,) = reply(ws.run("get_ipython().set_next_input('x=1')"))["payload"]
    assert following == {"source": "set_next_input", "text": "x=1", "replace": False}
    # The REST result carries both.
    result = gw.run(py, "len?")
    assert "Docstring" in result["payload"][0]["data"]["text/plain"] and result["outputs"] == []
    assert gw.run(py, "get_ipython().set_next_input('x=1')")["payload"] == [following]
    assert wire.text_of(out) == ""
