"""Section C: floods and very large outputs. There is no rate limiter: a slow reader slows the kernel down."""
import json
import time

import pytest
import wire
from casekit import Client, check_end, states, stderr, stdout

LINES = "".join(f"chunk-{i}\n" for i in range(20000))
FLOOD = "import sys\nfor i in range(20000):\n    sys.stdout.write(f'chunk-{i}\\n');sys.stdout.flush()"


def test_case_21_no_line_of_a_flood_is_missing(gw, py):
    """A pause of 3 instead of 6 s."""
    with Client(gw, py, rcvbuf=65536) as ws:
        request = ws.execute(FLOOD)
        time.sleep(3)
        out = ws.done(request)
        assert stdout(out) == LINES and stderr(out) == ""
        check_end(out)


def test_case_22_the_idle_comes_after_any_flood(gw, echo):
    """200 000 messages of a kernel that sends one for each line."""
    with Client(gw, echo, rcvbuf=65536) as ws:
        request = ws.execute("lines 200000")
        time.sleep(2)
        out = ws.done(request)
        assert stdout(out) == "".join(f"line {i}\n" for i in range(200000))
        check_end(out)
        assert gw.model(echo)["execution_state"] == "idle"
        assert ws.value("echo 1") == "1"


def test_case_22_a_client_that_only_watches_sees_the_idle_too(gw, py):
    with Client(gw, py, session="watcher", rcvbuf=65536) as watcher, Client(gw, py, session="asker") as asker:
        request = asker.execute(FLOOD.replace("20000", "5000"))
        asker.done(request)
        out = watcher.until_idle(request, reply=False)
        assert states([m for m in out if m["parent_header"].get("msg_id") == request]) == ["busy", "idle"]
        assert stdout(out).endswith("chunk-4999\n")


def test_case_24_five_megabytes_arrive(gw, py, ws):
    out = ws.run("print('x'*5_000_000)")
    assert stdout(out) == "x" * 5_000_000 + "\n" and stderr(out) == ""
    check_end(out)
    assert ws.value("1") == "1"
    result = gw.run(py, "print('x'*5_000_000)")
    assert result["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "x" * 5_000_000 + "\n"}]
    assert result["truncated_bytes"] == 0


def test_case_25_five_hundred_comms_all_answer(gw, py, ws):
    ws.run("import comm\ncs={}\ndef new(i):\n    c=comm.create_comm(target_name='t',data={'i':i})\n"
           "    c.on_msg(lambda m: c.send({'echo':m['content']['data']['n']}))\n    return c\n"
           "for i in range(500):\n    c=new(i); cs[c.comm_id]=c")
    ids = [m["content"]["comm_id"] for m in ws.all if m["msg_type"] == "comm_open"]
    assert len(set(ids)) == 500
    asked = [ws.ask("comm_msg", {"comm_id": c, "data": {"n": n}}) for n, c in enumerate(ids)]
    got = {}
    while len(got) < 500:
        m = ws.until(lambda m: m["msg_type"] == "comm_msg")
        assert m["content"]["comm_id"] not in got
        got[m["content"]["comm_id"]] = m["content"]["data"]["echo"]
    assert got == {c: n for n, c in enumerate(ids)} and len(asked) == 500


@pytest.mark.parametrize("size", [1, 20])
def test_case_24_a_rest_result_of_many_megabytes(gw, echo, size):
    result = gw.run(echo, f"flood {size * 1000000}")
    text = result["outputs"][0]["text"]
    assert len(text) == size * 1000000 and result["truncated_bytes"] == 0
    assert len(json.dumps(result)) > size * 1000000


def test_case_27_a_slow_reader_is_not_a_dead_one(fresh):
    """6 s of a flood that the client reads slowly, ping every second, time-out 2 s."""
    g = fresh("--ws-ping", "1", "--ws-pong-timeout", "2")
    k = g.kernel()
    with Client(g, k, rcvbuf=4096) as ws:
        ws.execute("flood 4000000")
        end, read = time.monotonic() + 6, 0
        while time.monotonic() < end:
            read += len(ws.s.recv(1500))
            time.sleep(0.02)
        assert g.model(k)["connections"] == 1
        ws.s.settimeout(60)
        while read < 4000000:
            chunk = ws.s.recv(1 << 20)
            assert chunk, "the connection was cut"
            read += len(chunk)
    assert isinstance(ws, wire.Kernel)
