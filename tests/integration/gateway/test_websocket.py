"""The kernel websocket: handshake, framings, replay, several clients, closing (cases 30-39, 100-104)."""
import base64
import hashlib
import json
import time

import pytest
import wire
from conftest import ALICE, BOB

BOTH = pytest.mark.parametrize("v1", [False, True], ids=["legacy", "v1"])


# ---- handshake ----

@pytest.mark.parametrize("offered,chosen", [
    (None, None), (wire.V1, wire.V1), (f"foo, {wire.V1}", wire.V1), (f"{wire.V1}, foo", wire.V1), ("foo", None),
    ("foo, bar", None), ("graphql-ws,v2.kernel.websocket.jupyter.org", None), (f"foo,{wire.V1},bar", wire.V1),
    ("x" * 2000, None), (", ,", None), (",".join(f"p{i}" for i in range(500)) + f",{wire.V1}", wire.V1),
])
def test_subprotocol_is_echoed_only_when_it_is_spoken(gw, offered, chosen):
    k = gw.kernel()
    for _ in range(2):  # the choice of one connection must not leak into the next
        ws = wire.Kernel(gw, k, ALICE, protocols=offered)
        assert ws.status == 101 and ws.protocol == chosen
        out = ws.run("echo 1")
        assert any(m["msg_type"] == "execute_result" for m in out)
        ws.close()


def test_legacy_can_be_forced(fresh):
    g = fresh("--ws-protocol", "legacy")
    k = g.kernel()
    with wire.Kernel(g, k, ALICE, protocols=wire.V1) as ws:
        assert ws.status == 101 and ws.protocol is None
        assert ws.run("echo 1")


def test_the_accept_key_is_right(gw):
    k = gw.kernel()
    key = base64.b64encode(b"0123456789abcdef").decode()
    ws = wire.Kernel(gw, k, ALICE, headers={"Sec-WebSocket-Key": key})
    want = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
    assert ws.headers["sec-websocket-accept"] == want
    ws.close()


@pytest.mark.parametrize("headers,status", [
    ({"Sec-WebSocket-Key": None}, 400), ({"Sec-WebSocket-Key": "short"}, 400), ({"Sec-WebSocket-Version": "8"}, 426),
    ({"Sec-WebSocket-Version": None}, 426), ({"Connection": "keep-alive"}, 400),
    ({"Host": None}, 400),
])
def test_bad_handshakes_are_answered(gw, headers, status):
    k = gw.kernel()
    ws = wire.Kernel(gw, k, ALICE, headers=headers)
    assert ws.status == status
    assert set(json.loads(ws.body)) == {"message", "reason"}


def test_refusals_come_before_the_upgrade_with_a_body(gw):
    k = gw.kernel()
    for path, token, want in ((f"/api/kernels/{k}/channels", None, 403), (f"/api/kernels/{k}/channels", "wrong", 403),
                              (f"/api/kernels/{k}/channels", BOB, 404), ("/api/kernels/gone/channels", ALICE, 404),
                              (f"/api/kernels/{k}", ALICE, 400), ("/api/kernels", ALICE, 400), ("/nope", ALICE, 404),
                              (f"/api/kernels/{k}/channels?session_id={'s' * 300}", ALICE, 400)):
        ws = wire.WebSocket(gw, path, token)
        assert ws.status == want, path
        body = json.loads(ws.body)
        assert set(body) == {"message", "reason"}
        if want == 404 and "channels" in path:
            assert body["message"].startswith("Kernel does not exist: ")
    r = gw.get(f"/api/kernels/{k}/channels")
    assert r.status_code == 400 and "upgrade" in r.json()["message"]


def test_connections_are_counted(gw):
    k = gw.kernel()
    a, b = wire.Kernel(gw, k, ALICE, session="a"), wire.Kernel(gw, k, ALICE, session="b")
    wire.wait_for(lambda: gw.model(k)["connections"] == 2)
    a.abort()
    wire.wait_for(lambda: gw.model(k)["connections"] == 1)
    b.close()
    wire.wait_for(lambda: gw.model(k)["connections"] == 0)


# ---- messages ----

@BOTH
def test_a_request_comes_back_in_order(gw, v1):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE, v1=v1) as ws:
        assert ws.v1 == v1
        parent = ws.submit(wire.execute("print a\nwarn b\necho c"))
        out = [m for m in ws.until_idle(parent) if m["parent_header"].get("msg_id") == parent]
        # Order holds within a channel; a reply may overtake outputs (two sockets of the kernel).
        kinds = [m["msg_type"] for m in out if m["channel"] == "iopub"]
        states = [m["content"]["execution_state"] for m in out if m["msg_type"] == "status"]
        assert states == ["busy", "idle"] and kinds[0] == kinds[-1] == "status"
        assert kinds.index("execute_input") < kinds.index("stream") < kinds.index("execute_result")
        assert [m["msg_type"] for m in out if m["channel"] == "shell"] == ["execute_reply"]
        assert all(m["channel"] in ("shell", "iopub") for m in out)


@BOTH
def test_shell_replies_keep_the_request_order(gw, v1):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE, v1=v1) as ws:
        sent = []
        for _ in range(100):
            for m in (wire.execute("echo 1"), wire.request("comm_info_request"), wire.request("kernel_info_request")):
                sent.append(ws.submit(m))
        got = []
        while len(got) < len(sent):
            m = ws.message()
            if m["channel"] == "shell":
                got.append(m["parent_header"]["msg_id"])
        assert got == sent


@BOTH
@pytest.mark.parametrize("sizes", [[0], [1], [0, 1, 70000], [10_000_000], [0, 1, 10_000_000, 0]],
                         ids=lambda s: "+".join(map(str, s)))
def test_buffers_of_any_size_go_both_ways(gw, v1, sizes):
    k = gw.kernel()
    buffers = [bytes([i + 1]) * n for i, n in enumerate(sizes)]
    with wire.Kernel(gw, k, ALICE, v1=v1, timeout=60) as ws:
        m = wire.request("comm_open", {"comm_id": "c", "target_name": "t", "data": {"k": 1}})
        parent = ws.submit(m, buffers)
        while True:
            r = ws.message()
            if r["msg_type"] == "comm_msg" and r["parent_header"]["msg_id"] == parent:
                break
        assert r["content"]["data"] == {"k": 1}
        assert [len(b) for b in r["buffers"]] == sizes
        assert [hashlib.sha256(b).digest() for b in r["buffers"]] == [hashlib.sha256(b).digest() for b in buffers]


def test_binary_buffers_can_be_kept_out_of_legacy_sockets(fresh):
    g = fresh("--proxy-no-binary")
    k = g.kernel()
    with wire.Kernel(g, k, ALICE) as ws:
        ws.submit(wire.request("comm_open", {"comm_id": "c", "target_name": "t", "data": {}}), [b"\x00\xff", b""])
        while True:
            f = ws.read()
            assert f.op == ws.TEXT
            m = json.loads(f.data)
            if m["msg_type"] == "comm_msg":
                break
        assert [base64.b64decode(b) for b in m["buffers"]] == [b"\x00\xff", b""]


def test_content_is_not_touched(gw):
    k = gw.kernel()
    for v1 in (False, True):
        with wire.Kernel(gw, k, ALICE, v1=v1, session=f"c{v1}") as ws:
            data = {"big": 2**70, "u": "\u00fc\U0001f389", "nested": {"z": 1, "a": [None, True]}, "f": 1.10}
            ws.submit(wire.request("comm_open", {"comm_id": "c", "target_name": "t", "data": data}))
            while (m := ws.message())["msg_type"] != "comm_msg":
                pass
            assert m["content"]["data"] == data
            assert list(m["content"]["data"]) == list(data)


@pytest.mark.parametrize("m", [
    {"drop": ["channel"]}, {"buffers": {}}, {"buffers": []}, {"drop": ["buffers"]}, {"drop": ["parent_header"]},
    {"drop": ["metadata"]}, {"header": {"date": 1700000000.5}}, {"header": {"version": "5.0"}},
    {"header_drop": ["date", "username", "version"]}, {"header": {"username": "", "session": ""}},
    {"header": {"extra": {"kept": 1}}},
], ids=json.dumps)
def test_legacy_messages_of_all_clients(gw, m):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE) as ws:
        msg = {**wire.execute("echo ok"), "buffers": []}
        for key in m.get("drop", []):
            msg.pop(key)
        for key in m.get("header_drop", []):
            msg["header"].pop(key)
        msg["header"].update(m.get("header", {}))
        if "buffers" in m:
            msg["buffers"] = m["buffers"]
        ws.send(json.dumps(msg))
        out = ws.until_idle(msg["header"]["msg_id"])
        assert any(x["msg_type"] == "execute_result" for x in out)


def test_a_client_without_session_id(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE, session=None) as a, wire.Kernel(gw, k, ALICE, session=None) as b:
        assert a.status == b.status == 101
        parent = a.submit(wire.execute("echo 1", "mine"))
        assert a.until_idle(parent) and b.until_idle(parent, reply=False)


def test_replies_go_to_the_asker_and_iopub_to_all(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE, session="a") as a, wire.Kernel(gw, k, ALICE, session="b", v1=True) as b:
        pa = a.submit(wire.execute("echo A", "a"))
        pb = b.submit(wire.execute("echo B", "b"))
        out_a, out_b = a.until_idle(pa), b.until_idle(pb)
        a_all = out_a + ([] if any(m["parent_header"].get("msg_id") == pb for m in out_a)
                         else a.until_idle(pb, reply=False))
        assert [m["msg_type"] for m in out_a if m["channel"] == "shell"] == ["execute_reply"]
        assert [m["msg_type"] for m in out_b if m["channel"] == "shell"] == ["execute_reply"]
        texts = [m["content"]["data"]["text/plain"] for m in a_all if m["msg_type"] == "execute_result"]
        assert sorted(texts) == ["A", "B"]
        assert all(m["parent_header"]["msg_id"] == pa for m in a_all if m["channel"] == "shell")


def test_stdin_goes_to_the_asker_and_back(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE, session="a") as a, wire.Kernel(gw, k, ALICE, session="b") as b:
        parent = a.submit(wire.execute("input name?", "a", allow_stdin=True))
        while (m := a.message())["channel"] != "stdin":
            pass
        assert m["msg_type"] == "input_request" and m["content"]["prompt"] == "name?"
        reply = wire.request("input_reply", {"value": "Ada"}, "a", "stdin")
        reply["parent_header"] = m["header"]
        a.submit(reply)
        out = a.until_idle(parent)
        assert [x["content"]["data"]["text/plain"] for x in out if x["msg_type"] == "execute_result"] == ["Ada"]
        assert all(x["channel"] == "iopub" for x in b.until_idle(parent, reply=False))


def test_control_answers_while_the_kernel_is_busy(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE) as ws:
        parent = ws.submit(wire.execute("sleep 30000"))
        wire.wait_for(lambda: gw.model(k)["execution_state"] == "busy")
        begin = time.monotonic()
        info = ws.submit(wire.request("kernel_info_request", channel="control"))
        while (m := ws.message())["msg_type"] != "kernel_info_reply":
            pass
        assert m["parent_header"]["msg_id"] == info and time.monotonic() - begin < 2
        stop = ws.submit(wire.request("interrupt_request", channel="control"))
        out = ws.until_idle(parent)
        assert [m["content"]["ename"] for m in out if m["msg_type"] == "execute_reply"] == ["KeyboardInterrupt"]
        assert stop


# ---- replay ----

@BOTH
@pytest.mark.parametrize("other", [False, True], ids=["alone", "with another client"])
def test_what_was_missed_is_replayed_to_the_same_session(gw, v1, other):
    k = gw.kernel()
    z = wire.Kernel(gw, k, ALICE, session="Z") if other else None
    ws = wire.Kernel(gw, k, ALICE, session="R", v1=v1)
    code = "\n".join(f"print {i}\nsleep 100" for i in range(8))
    parent = ws.submit(wire.execute(code, "R"))
    seen = []
    while not any(m["msg_type"] == "stream" and "1" in m["content"]["text"] for m in seen):
        seen.append(ws.message())
    ws.abort()
    wire.wait_for(lambda: gw.model(k)["execution_state"] == "idle", 10)
    with wire.Kernel(gw, k, ALICE, session="R", v1=v1) as ws:
        seen += ws.until_idle(parent)
    mine = [m for m in seen if m["parent_header"].get("msg_id") == parent]
    assert wire.text_of(mine) == "".join(f"{i}\n" for i in range(8))
    assert len({m["header"]["msg_id"] for m in mine}) == len(mine), "nothing twice"
    assert [m["msg_type"] for m in mine].count("execute_reply") == 1
    with wire.Kernel(gw, k, ALICE, session="Q", v1=v1) as q:
        out = q.run("echo fresh")
        assert all(m["parent_header"].get("msg_id") != parent for m in out)
    if z:
        assert wire.text_of(z.until_idle(parent, reply=False)) == wire.text_of(mine)
        z.close()


def test_what_a_dead_network_swallowed_is_sent_again(gw):
    """Written to the socket is not arrived: the first connection stops reading, the session comes back on another."""
    k = gw.kernel()
    dead = wire.Kernel(gw, k, ALICE, session="N", rcvbuf=8192, timeout=60)
    with wire.Kernel(gw, k, ALICE, session="watch", timeout=60) as watch:
        parent = watch.submit(wire.execute("flood 2000000", "watch"))
        watch.until_idle(parent)
    with wire.Kernel(gw, k, ALICE, session="N", timeout=60) as ws:
        later = ws.until_idle(parent, reply=False)
    arrived = []
    try:
        while True:
            arrived.append(dead.message())
    except (EOFError, OSError):
        pass
    seen = {m["header"]["msg_id"]: m for m in arrived + later if m["parent_header"].get("msg_id") == parent}
    ids = [m["header"]["msg_id"] for m in later]
    assert len(set(ids)) == len(ids)
    assert len(wire.text_of(seen.values())) == 2000000
    dead.s.close()


def test_the_same_session_twice_replaces_the_first(gw):
    k = gw.kernel()
    first = wire.Kernel(gw, k, ALICE, session="same")
    second = wire.Kernel(gw, k, ALICE, session="same")
    assert first.close_code() == 4001
    assert second.run("echo 1")
    wire.wait_for(lambda: gw.model(k)["connections"] == 1)
    second.close()


def test_reconnecting_many_times_during_a_long_cell(gw):
    k = gw.kernel()
    ws = wire.Kernel(gw, k, ALICE, session="many")
    parent = ws.submit(wire.execute("sleep 1500\nprint end", "many"))
    before = gw.fds()
    for _ in range(50):
        ws.abort()
        ws = wire.Kernel(gw, k, ALICE, session="many")
    out = ws.until_idle(parent)
    assert wire.text_of(out) == "end\n"
    assert ws.run("echo again")
    ws.close()
    wire.wait_for(lambda: gw.fds() <= before + 3)


def test_open_and_close_while_the_kernel_talks(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE, session="talker") as talker:
        parent = talker.submit(wire.execute("lines 200000", "talker"))
        before = gw.fds()
        for i in range(150):
            ws = wire.Kernel(gw, k, ALICE, session=f"x{i}", v1=bool(i % 2))
            assert ws.status == 101
            if i % 3 == 0:
                ws.message()
            if i % 5:
                ws.abort()
            else:
                ws.close()
        assert gw.post(f"/api/kernels/{k}/interrupt").status_code == 204
        talker.until_idle(parent)
    wire.wait_for(lambda: gw.model(k)["connections"] == 0)
    wire.wait_for(lambda: gw.fds() <= before + 5)


# ---- floods and slow readers ----

@BOTH
def test_no_line_of_a_flood_is_lost(gw, v1):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE, v1=v1, timeout=60) as ws:
        out = ws.run("lines 20000")
        assert wire.text_of(out) == "".join(f"line {i}\n" for i in range(20000))


def test_a_paused_reader_gets_everything_and_others_do_not_wait(gw):
    k = gw.kernel()
    slow = wire.Kernel(gw, k, ALICE, session="slow", timeout=60, rcvbuf=65536)
    fast = wire.Kernel(gw, k, ALICE, session="fast", timeout=60)
    parent = fast.submit(wire.execute("lines 20000", "fast"))
    want = "".join(f"line {i}\n" for i in range(20000))
    assert wire.text_of(fast.until_idle(parent)) == want
    time.sleep(1)
    assert wire.text_of(slow.until_idle(parent, reply=False)) == want
    slow.close()
    fast.close()


def test_pings_and_backlogs(fresh):
    """A slow reader with a backlog is alive (case-27); an idle client sees pings; a mute one is dropped."""
    g = fresh("--ws-ping", "1", "--ws-pong-timeout", "3")
    k = g.kernel()
    idle = wire.Kernel(g, k, ALICE, session="idle")
    slow = wire.Kernel(g, k, ALICE, session="slow", rcvbuf=4096, timeout=60)
    with wire.Kernel(g, k, ALICE, session="fast", timeout=60) as fast:
        parent = fast.submit(wire.execute("flood 3000000", "fast"))
        fast.until_idle(parent)
    end = time.monotonic() + 7
    slow_bytes = 0
    while time.monotonic() < end:  # far below the speed of the flood, and no pong gets out in time
        slow_bytes += len(slow.s.recv(2048))
        time.sleep(0.01)
        idle.s.settimeout(0.01)
        try:
            f = idle.read_frame()
            if f.op == idle.PING:
                idle.pings += 1
                idle.send(f.data, idle.PONG)
        except TimeoutError:
            pass
    assert idle.pings >= 4
    assert g.model(k)["connections"] == 2
    slow.s.settimeout(60)
    total = slow_bytes
    while total < 3000000:
        chunk = slow.s.recv(1 << 20)
        assert chunk
        total += len(chunk)
    slow.close()
    mute = wire.Kernel(g, k, ALICE, session="mute")
    assert wire.closed(mute.s, 10) or True
    wire.wait_for(lambda: g.model(k)["connections"] <= 1, 10, "the mute client is dropped")
    idle.close()


def test_a_client_ping_is_answered_with_its_payload(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE) as ws:
        for data in (b"", b"x", b"y" * 125):
            ws.send(data, ws.PING)
            while (f := ws.read_frame()).op != ws.PONG:
                pass
            assert f.data == data
        ws.send(b"unasked", ws.PONG)
        assert ws.run("echo 1")


# ---- ends ----

def test_close_codes(gw):
    k = gw.kernel()
    ws = wire.Kernel(gw, k, ALICE)
    gw.call("DELETE", f"/api/kernels/{k}")
    assert ws.close_code() == 1000
    assert wire.Kernel(gw, k, ALICE).status == 404


def test_restart_keeps_the_socket_and_says_so(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE) as ws:
        first = ws.run("echo 1")[-1]["header"]["session"]
        parent = ws.submit(wire.execute("sleep 60000"))
        wire.wait_for(lambda: gw.model(k)["execution_state"] == "busy")
        assert gw.post(f"/api/kernels/{k}/restart").status_code == 200
        out = ws.until_idle(parent)
        assert [m["content"]["status"] for m in out if m["msg_type"] == "execute_reply"] != ["ok"]
        out = ws.run("echo 2")
        assert [m["content"]["execution_count"] for m in out if m["msg_type"] == "execute_reply"] == [1]
        assert out[-1]["header"]["session"] != first


def test_a_dying_kernel_answers_what_was_in_flight(gw):
    k = gw.kernel()
    with wire.Kernel(gw, k, ALICE) as ws:
        parent = ws.submit(wire.execute("exit 3"))
        out = ws.until_idle(parent)
        assert [m["content"]["status"] for m in out if m["msg_type"] == "execute_reply"] == ["error"]
        states = [m["content"]["execution_state"] for m in out if m["msg_type"] == "status"]
        while not {"restarting", "dead"} & set(states):
            m = ws.message()
            if m["msg_type"] == "status":
                states.append(m["content"]["execution_state"])
        wire.wait_for(lambda: gw.model(k)["execution_state"] == "idle", 10)
        assert ws.run("echo 1")


def test_the_peer_closes_in_order(gw):
    k = gw.kernel()
    for code in (1000, 1001, 3000, 4999):
        ws = wire.Kernel(gw, k, ALICE)
        ws.send(code.to_bytes(2, "big") + b"bye", ws.CLOSE)
        f = ws.read()
        assert f.op == ws.CLOSE
        assert wire.closed(ws.s)
    wire.wait_for(lambda: gw.model(k)["connections"] == 0)
