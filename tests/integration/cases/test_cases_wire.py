"""Section D (websocket, buffers) and J (numbers): what goes over the wire unchanged."""
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import time
import uuid

import launch
import pytest
import wire
from casekit import ALICE, Client, check_end, data, reply, state, stderr, stdout, strict
from wire import wait_for

BOTH = pytest.mark.parametrize("v1", [False, True], ids=["legacy", "v1"])


def test_case_30_a_subprotocol_is_promised_only_when_it_is_spoken(gw, py):
    with Client(gw, py, session="a", v1=True) as a, Client(gw, py, session="b") as b:
        assert a.protocol == wire.V1 and b.protocol is None
        request = a.execute("1")
        idle = None
        while not idle:
            f = a.read()
            assert f.op == a.BINARY
            n = struct.unpack_from("<Q", f.data)[0]
            assert n >= 6 and struct.unpack_from("<Q", f.data, 8)[0] == 8 * (n + 1)
            m = wire.parse(f, True)
            idle = m["parent_header"].get("msg_id") == request and state(m) == "idle"
        idle = None
        while not idle:
            f = b.read()
            assert f.op == b.TEXT
            m = wire.parse(f, False)
            idle = m["parent_header"].get("msg_id") == request and state(m) == "idle"


def test_case_32_opening_while_the_kernel_talks(gw, py):
    """100 of the 500 sockets."""
    with Client(gw, py) as ws:
        ws.run("import threading,time\nrun=True\ndef f():\n    while run: print('.',flush=True); time.sleep(.001)\n"
               "threading.Thread(target=f,daemon=True).start()")
        before = gw.fds()
        for i in range(100):
            other = Client(gw, py, session=f"s{i}", v1=bool(i % 2))
            assert other.status == 101
            if i % 4 == 0:
                m = other.message()  # whole or not at all: parsed by the client
                assert m["msg_type"] == "stream"
            if i % 3:
                other.abort()
            else:
                other.close()
        wait_for(lambda: gw.model(py)["connections"] == 1, 5, "connections go down")
        wait_for(lambda: gw.fds() <= before + 5, 5, "descriptors come back")
        ws.run("run=False")


def settled(value):
    """The value once it has stayed the same for a second: kernels of earlier tests may still be ending."""
    seen, since = value(), time.monotonic()
    deadline = since + 30
    while time.monotonic() - since < 1:
        assert time.monotonic() < deadline, "never the same for a second"
        time.sleep(0.1)
        now = value()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


def test_case_33_descriptors_do_not_leak(gw, py, echo):
    """200 of the 1000 reconnects, 3 of the 50 restarts, and a kernel that is stopped."""
    pid = int(gw.run(py, "import os;os.getpid()")["outputs"][0]["data"]["text/plain"])
    frozen = gw.kernel()
    frozen_pid = int(gw.run(frozen, "pid")["outputs"][0]["data"]["text/plain"])
    os.kill(frozen_pid, signal.SIGSTOP)
    rng = random.Random(33)
    before = settled(gw.fds)
    try:
        for i in range(200):
            ws = Client(gw, (py, echo, frozen)[i % 3], session=f"s{i % 7}")
            ws.ask("kernel_info_request")
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.01)
            ws.abort()
            if i in (50, 100, 150):
                assert gw.post(f"/api/kernels/{echo}/restart").status_code == 200
    finally:
        os.kill(frozen_pid, signal.SIGCONT)
    for k in (py, echo, frozen):
        wait_for(lambda k=k: gw.model(k)["connections"] == 0, 5, "connections go down")
    after = settled(gw.fds)
    assert abs(after - before) <= 5, f"{before} descriptors before, {after} after"
    assert gw.run(py, "import os;os.getpid()")["outputs"][0]["data"]["text/plain"] == str(pid)
    assert gw.run(frozen, "echo 1")["status"] == "ok"


@pytest.mark.parametrize("options", [("--ws-ping", "30000", "--ws-pong-timeout", "90000"),
                                     ("--ws-ping", "30", "--ws-pong-timeout", "20")])
def test_case_35_times_that_cannot_be_meant_are_refused(environ, tmp_path, options):
    argv = [launch.cellvisor(), "serve", "--port", "0", "--insecure-local", "--local-only", "--state", str(tmp_path)]
    done = subprocess.run([*argv, *options], env={**os.environ, **environ}, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "--ws-ping" in done.stderr
    assert "seconds" in done.stderr, done.stderr


def test_case_35_an_idle_socket_stays(fresh):
    """Ping every second, time-out 3: nothing but pings and pongs for 7 s."""
    g = fresh("--ws-ping", "1", "--ws-pong-timeout", "3")
    with Client(g, g.kernel()) as ws:
        assert [m for m in ws.during(7) if state(m) not in ("idle", "starting")] == []
        assert ws.pings >= 4
        assert ws.value("echo 1") == "1"


def test_case_35_the_default_interval_fits_common_proxies():
    text = subprocess.run([launch.cellvisor(), "serve", "--help"], capture_output=True, text=True, check=True).stdout
    line = next(x for x in text.splitlines() if "--ws-ping " in x)
    assert "SECONDS" in line and "[default: 25]" in line


@pytest.mark.parametrize("frame,code", [("", None), ("{bad", 1007), ("[]", 1007), ("null", 1007),
                                        ('{"channel":"shell","content":{}}', 1007), (b"\0\0", 1007)], ids=repr)
def test_case_36_frames_that_are_no_messages(gw, echo, frame, code):
    """An empty frame is ignored (some proxies send them); any other closes that socket alone, with 1007."""
    with Client(gw, echo, session="good") as good:
        bad = Client(gw, echo, session="bad")
        bad.send(frame, None if isinstance(frame, str) else bad.BINARY)
        if code:
            assert bad.close_code() == code
        else:
            assert bad.value("echo still here") == "still here"
            bad.close()
        assert good.value("echo 1") == "1"


def test_case_38_a_kernel_that_is_gone(gw):
    gone = str(uuid.uuid4())
    ws = wire.WebSocket(gw, f"/api/kernels/{gone}/channels?token={ALICE}")
    assert ws.status == 404
    assert gone in json.loads(ws.body)["message"]
    assert ALICE not in gw.log() and "Traceback" not in gw.log()


@BOTH
def test_case_39_buffers_in_both_directions(gw, py, v1):
    with Client(gw, py, v1=v1) as ws:
        out = ws.run("import comm\ngot=[]\n"
                     "c=comm.create_comm(target_name='t',data={'k':1},buffers=[b'',b'\\x00',bytes(range(250))*40000])\n"
                     "c.on_msg(lambda m: got.append([bytes(b) for b in m['buffers']]))")
        (opened,) = [m for m in out if m["msg_type"] == "comm_open"]
        assert opened["content"]["data"] == {"k": 1}
        want = [b"", b"\x00", bytes(range(250)) * 40000]
        assert [len(b) for b in opened["buffers"]] == [len(b) for b in want]
        assert [hashlib.sha256(b).digest() for b in opened["buffers"]] == [hashlib.sha256(b).digest() for b in want]
        comm = opened["content"]["comm_id"]
        for buffers in ([b"\xff\xfe", b""], [], [os.urandom(10**6)]):
            ws.submit(wire.request("comm_msg", {"comm_id": comm, "data": {}}, ws.session), buffers)
            assert ws.value("[len(b) for b in got[-1]]") == str([len(b) for b in buffers])
            sums = "".join(hashlib.sha256(b).hexdigest() for b in buffers)
            assert ws.value("import hashlib;''.join(hashlib.sha256(b).hexdigest() for b in got[-1])") == repr(sums)


@BOTH
def test_case_90_the_client_always_gets_valid_json(gw, py, v1):
    with Client(gw, py, v1=v1) as ws:
        ws.execute("display({'application/json':{'a':float('nan'),'b':float('inf'),'c':1.5}},raw=True)")
        shown = None
        while shown is None:
            f = ws.read()
            texts = [f.data] if not v1 else f.data[struct.unpack_from("<Q", f.data, 8)[0] + 5:].split(b"}{")
            m = wire.parse(f, v1)
            if m["msg_type"] == "display_data":
                shown = m["content"]["data"]["application/json"]
                if not v1:
                    strict(texts[0])
                for token in (b"NaN", b"Infinity"):
                    assert token not in f.data
        ws.run("")
        assert stderr(ws.all) == ""
        assert shown["c"] == 1.5 and shown["a"] is None and shown["b"] is None


def test_case_91_big_integers_keep_their_digits(gw, py):
    code = "display({'application/json':{'n':2**64,'m':12345678901112131}},raw=True)"
    for v1 in (False, True):
        with Client(gw, py, v1=v1) as ws:
            ws.execute(code)
            while True:
                f = ws.read()
                if wire.parse(f, v1)["msg_type"] == "display_data":
                    break
            assert b"18446744073709551616" in f.data and b"12345678901112131" in f.data
    raw = gw.post(f"/api/kernels/{py}/execute", {"code": code}).content
    assert b"18446744073709551616" in raw and b"12345678901112131" in raw


def test_case_91_what_the_client_sends_keeps_its_digits_too(gw, ws):
    ws.run("import comm\ngot=[]\nc=comm.create_comm(target_name='t')\nc.on_msg(lambda m: got.append(m['content']['data']))")
    comm = [m for m in ws.all if m["msg_type"] == "comm_open"][0]["content"]["comm_id"]
    ws.ask("comm_msg", {"comm_id": comm, "data": {"n": 2**64, "m": 12345678901112131}})
    assert ws.value("got[-1]['n']-2**64, got[-1]['m']-12345678901112131") == "(0, 0)"


def test_case_90_nothing_else_than_valid_json_is_made_of_strange_values(gw, ws):
    out = ws.run("display({'application/json':{'k\\0':'\\0\\x7f\\u2028','d':1e400}},raw=True)")
    assert check_end(out)["status"] == "ok" and reply(out)["status"] == "ok"
    assert data(out)[0]["application/json"]["k\0"] == "\0\x7f\u2028"
    assert stderr(out) == "" and stdout(out) == ""
