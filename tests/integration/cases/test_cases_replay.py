"""Section L: reconnecting, replay, several clients."""
import re
import time

from casekit import Client, check_end, reply, state, stderr, stdout, within
from wire import wait_for

SLOW = "import time\nfor i in range(6): print(i,flush=True); time.sleep(.5)"


def leave(gw, py, session="R"):
    """A client that drops 0.8 s into its cell: (request, what it has seen)."""
    ws = Client(gw, py, session=session)
    request = ws.execute(SLOW)
    ws.until(lambda m: m["msg_type"] == "execute_input")
    ws.during(0.8)
    ws.abort()
    return request, ws.all


def check_returned(ws, request, seen):
    """What was missed, once, in order."""
    ws.done(request)
    ws.during(0.3)
    assert stdout(seen) + stdout(ws.all) == "0\n1\n2\n3\n4\n5\n"
    assert stdout(seen).startswith("0\n") and "5\n" in stdout(ws.all)
    ids = [m["header"]["msg_id"] for m in seen + ws.all if m["parent_header"].get("msg_id") == request]
    assert len(set(ids)) == len(ids)
    both = [m for m in seen + ws.all if m["parent_header"].get("msg_id") == request]
    assert check_end(both)["status"] == "ok"


def test_case_100_output_while_away_comes_to_the_same_session(gw, py):
    request, seen = leave(gw, py)
    time.sleep(3.5)
    with Client(gw, py, session="R") as back:
        check_returned(back, request, seen)


def test_case_100_and_to_no_other(gw, py):
    request, _ = leave(gw, py)
    time.sleep(3.5)
    with Client(gw, py, session="Q") as other:
        other.run("'own'")
        assert other.of(request) == []


def test_case_100_back_before_the_end(gw, py):
    request, seen = leave(gw, py)
    with Client(gw, py, session="R", v1=True) as back:
        check_returned(back, request, seen)


def test_case_101_also_when_somebody_else_stayed(gw, py):
    with Client(gw, py, session="Z") as stayed:
        request, seen = leave(gw, py)
        time.sleep(3.5)
        with Client(gw, py, session="R") as back:
            check_returned(back, request, seen)
        stayed.during(0.3)
        assert stdout(stayed.of(request)) == "0\n1\n2\n3\n4\n5\n"
        assert not [m for m in stayed.of(request) if m["channel"] == "shell"]


def test_case_103_a_reconnect_during_a_cell_blocks_nothing(gw, py):
    """15 of the 100 times, with cells of 0.3 s; then the case's own times once."""
    session = "same"
    for i in range(15):
        ws = Client(gw, py, session=session)
        ws.execute("import time;time.sleep(.3)")
        ws.until(lambda m: state(m) == "busy")
        (ws.abort if i % 2 else ws.close)()
        with Client(gw, py, session=session) as back, within(2):
            assert back.value(f"'again {i}'") == f"'again {i}'"
    ws = Client(gw, py, session=session)
    ws.execute("import time;time.sleep(5)")
    time.sleep(1)
    ws.abort()
    with Client(gw, py, session=session) as back, within(6):
        assert back.value("'again'") == "'again'"


def test_case_104_attaching_to_a_busy_kernel(gw, py, ws):
    request = ws.execute("import time;time.sleep(60)")
    ws.until(lambda m: m["msg_type"] == "execute_input")
    with within(0.5, "handshake"):
        new = Client(gw, py, session="new")
    assert new.status == 101 and gw.model(py)["execution_state"] == "busy"
    for channel in ("control", "shell"):
        with within(1, f"kernel_info on {channel}"):
            asked = new.ask("kernel_info_request", channel=channel)
            m = new.until(lambda m: m["msg_type"] == "kernel_info_reply")
        assert m["parent_header"]["msg_id"] == asked and m["content"]["status"] == "ok"
    assert gw.model(py)["execution_state"] == "busy"
    assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
    assert reply(ws.done(request))["ename"] == "KeyboardInterrupt"
    new.close()


def test_case_106_a_replay_that_lost_something_says_so(fresh):
    """Replay limit 1 MiB, 5 MB printed meanwhile."""
    g = fresh("--replay-memory", "1")
    k = g.kernel()
    ws = Client(g, k, session="R")
    request = ws.execute("sleep 500\nflood 5000000\nprint the end")
    ws.until(lambda m: state(m) == "busy")
    ws.abort()
    wait_for(lambda: g.model(k)["execution_state"] == "idle", 20)
    with Client(g, k, session="R") as back:
        back.until(lambda m: state(m) == "idle" and m["parent_header"]["msg_id"] == request)
        back.done(request)
        notices = [m for m in back.all if m["msg_type"] == "stream" and m["content"]["name"] == "stderr"]
        assert len(notices) == 1
        found = re.search(r"(\d+) messages \((\d+) bytes", notices[0]["content"]["text"])
        assert found and int(found[1]) > 0
        first_stdout = next(m for m in back.all if m["msg_type"] == "stream" and m["content"]["name"] == "stdout")
        assert back.all.index(notices[0]) < back.all.index(first_stdout)
        text = stdout(back.all)
        assert text.endswith("the end\n") and 0 < len(text) < 5000000
        assert len(text) + int(found[2]) > 5000000, "the notice counts what is missing"
        assert reply(back.of(request))["status"] == "ok"
        assert back.value("echo 1") == "1" and stderr(back.of(request)) == notices[0]["content"]["text"]


def test_case_106_nothing_is_lost_for_those_who_stay(fresh):
    g = fresh("--replay-memory", "1", "--log-memory", "8")
    k = g.kernel()
    away = Client(g, k, session="away")
    away.abort()
    with Client(g, k, session="here") as ws:
        out = ws.run("flood 20000000")
        assert len(stdout(out)) == 20000000 and stderr(out) == ""
