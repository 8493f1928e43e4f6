"""Websocket frames in every wrong way: only that socket may suffer (cases 36, 39)."""
import json
import os
import random
import struct

import pytest
import wire
from conftest import ALICE
from hypothesis import HealthCheck, given, settings, strategies

W = wire.WebSocket
LEGACY_BAD = ["{bad", "[]", "null", '{"channel":"shell","content":{}}', "1", '"x"', "{}", '{"header":[]}', '{"header":{}}',
              '{"header":{"msg_type":1}}', '{"header":{"msg_id":"1"},"content":{}}', "\x00", "x", "{" * 600, " ",
              '{"header":{"msg_id":"a","msg_type":"x"},"content":[]}', '{"header":"{}"}',
              '{"header":{"msg_id":"a","msg_type":"' + "t" * 400 + '"}}', '{"header":{"msg_id":"a","msg_type":"x"}']
BINARY_BAD = [b"\0\0", b"\0\0\0\0", b"\0\0\0\1\0\0\0\x08", b"\xff" * 16, struct.pack(">3I", 2, 12, 8) + b"{}" + bytes(8),
              struct.pack(">3I", 2, 12, 0xffffffff) + b"{}", struct.pack(">2I", 1, 8) + b"not json",
              struct.pack(">I", 0x10000000) + bytes(64)]
V1_BAD = [b"", b"\0", bytes(8), struct.pack("<Q", 5) + bytes(48), struct.pack("<Q", 2**63) + bytes(64),
          struct.pack("<7Q", 6, 56, 61, 63, 65, 67, 70) + b"shell{}{}{}{}",
          struct.pack("<7Q", 6, 56, 61, 60, 65, 67, 69) + b"shell{}{}{}{}",
          struct.pack("<7Q", 6, 56, 61, 63, 65, 67, 2**64 - 1) + b"shell{}{}{}{}",
          struct.pack("<7Q", 6, 0, 0, 0, 0, 0, 0), b'{"header":{}}', b"\xff" * 200,
          wire.to_v1({**wire.execute("x"), "header": {}}), wire.to_v1({**wire.execute("x"), "content": 5})]


@pytest.fixture(scope="module")
def kernel(gw):
    """One kernel and a witness on it: a bad neighbour must not touch it."""
    k = gw.kernel()
    witness = wire.Kernel(gw, k, ALICE, session="witness")
    yield k, witness
    witness.close()


@pytest.fixture(autouse=True)
def no_kernels_left():
    """This module keeps its kernel (overrides the one of conftest)."""
    yield


def unhurt(gw, kernel):
    k, witness = kernel
    assert any(m["msg_type"] == "execute_result" for m in witness.run("echo still here"))
    assert gw.model(k)["execution_state"] in ("idle", "busy")


def outcome(ws):
    """Close code, or None when the socket still works."""
    probe = wire.execute("echo probe", ws.session)
    try:
        ws.submit(probe)
        while True:
            f = ws.read()
            if f.op == W.CLOSE:
                assert len(f.data) < 126
                f.reason
                return f.code
            if wire.parse(f, ws.v1)["parent_header"].get("msg_id") == probe["header"]["msg_id"]:
                return None
    except (EOFError, ConnectionError):
        return "dropped"


@pytest.mark.parametrize("text", LEGACY_BAD, ids=lambda t: repr(t[:30]))
def test_bad_legacy_text(gw, kernel, text):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="bad")
    ws.send(text)
    assert outcome(ws) in (1007, 1009)
    ws.close()
    unhurt(gw, kernel)


@pytest.mark.parametrize("data", BINARY_BAD, ids=lambda d: d[:12].hex())
def test_bad_legacy_binary(gw, kernel, data):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="bad")
    ws.send(data)
    assert outcome(ws) in (1007, 1009)
    ws.close()
    unhurt(gw, kernel)


@pytest.mark.parametrize("data", V1_BAD, ids=lambda d: d[:12].hex())
def test_bad_v1(gw, kernel, data):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="bad", v1=True)
    ws.send(data, W.BINARY)
    assert outcome(ws) in ((None,) if data == b"" else (1007, 1009))
    ws.close()
    unhurt(gw, kernel)


def test_empty_frames_are_ignored(gw, kernel):
    for v1 in (False, True):
        ws = wire.Kernel(gw, kernel[0], ALICE, session="empty", v1=v1)
        for op in (W.TEXT, W.BINARY):
            ws.send(b"", op)
            ws.send_bytes(ws.frame(op, b"", fin=False) + ws.frame(W.MORE, b"", fin=False) + ws.frame(W.MORE, b""))
        assert outcome(ws) is None
        ws.close()


def test_unknown_channels_are_ignored(gw, kernel):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="chan")
    ws.submit({**wire.execute("echo x"), "channel": "nope"})
    assert outcome(ws) is None
    ws.close()
    ws = wire.Kernel(gw, kernel[0], ALICE, session="chan", v1=True)
    ws.submit({**wire.execute("echo x"), "channel": "nope"})
    assert outcome(ws) is None
    ws.close()


def test_clients_may_not_publish_on_iopub(gw, kernel):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="iopub")
    ws.submit(wire.request("stream", {"name": "stdout", "text": "forged"}, channel="iopub"))
    assert outcome(ws) in (None, 1007)
    ws.close()
    _, witness = kernel
    assert "forged" not in wire.text_of(witness.run("echo 1"))


@pytest.mark.parametrize("v1", [False, True], ids=["legacy", "v1"])
@pytest.mark.parametrize("piece", [1, 2, 125, 126, 65535, 65536])
def test_any_fragmentation_is_put_together(gw, kernel, v1, piece):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="frag", v1=v1)
    m = wire.execute("echo " + "x" * (300 if piece < 100 else 200000), "frag")
    data = wire.to_v1(m) if v1 else json.dumps({**m, "buffers": []}).encode()
    pieces = [data[i:i + piece] for i in range(0, len(data), piece)]
    out = b""
    for i, p in enumerate(pieces):
        op = (W.BINARY if v1 else W.TEXT) if i == 0 else W.MORE
        out += ws.frame(op, p, fin=i == len(pieces) - 1)
        if i % 50 == 1:
            out += ws.frame(W.PING, b"between") + ws.frame(W.PONG, b"")
    ws.send_bytes(out)
    got = [x for x in ws.until_idle(m["header"]["msg_id"]) if x["msg_type"] == "execute_result"]
    assert got[0]["content"]["data"]["text/plain"].strip("x") == ""
    ws.close()


def test_frames_in_single_bytes(gw, kernel):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="drip")
    m = {**wire.execute("echo drip", "drip"), "buffers": []}
    for b in ws.frame(W.TEXT, json.dumps(m).encode()) + ws.frame(W.PING, b"p"):
        ws.send_bytes(bytes([b]))
    assert any(x["msg_type"] == "execute_result" for x in ws.until_idle(m["header"]["msg_id"]))
    ws.close()


def test_a_frame_behind_the_handshake_in_one_packet(gw, kernel):
    m = {**wire.execute("echo early", "early"), "buffers": []}
    ws = object.__new__(wire.Kernel)
    ws.gw, ws.rx, ws.pings, ws.v1, ws.session = gw, b"", 0, False, "early"
    ws.s = wire.connect(gw)
    ws.s.sendall((f"GET /api/kernels/{kernel[0]}/channels?session_id=early HTTP/1.1\r\nHost: localhost\r\n"
                  f"Authorization: token {ALICE}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                  "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n").encode() +
                 ws.frame(W.TEXT, json.dumps(m).encode()))
    assert wire.read_response(ws.s)[0] == 101
    assert any(x["msg_type"] == "execute_result" for x in ws.until_idle(m["header"]["msg_id"]))
    ws.close()


def test_binary_sent_with_the_text_opcode(gw, kernel):
    """Some proxies re-send binary frames as text (jupyter.md 1.5 b)."""
    ws = wire.Kernel(gw, kernel[0], ALICE, session="proxy")
    m = wire.request("comm_open", {"comm_id": "c", "target_name": "t", "data": {}}, "proxy")
    ws.send(wire.to_legacy_binary(m, [b"\xff\xfe\x00"]), W.TEXT)
    while (r := ws.message())["msg_type"] != "comm_msg":
        pass
    assert r["buffers"] == [b"\xff\xfe\x00"]
    ws.close()


def test_invalid_utf8_in_text_hurts_nobody(gw, kernel):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="utf8")
    m = json.dumps({**wire.execute("echo @", "utf8"), "buffers": []}).encode().replace(b"@", b"\xc3\x28\xff")
    ws.send(m, W.TEXT)
    assert outcome(ws) == 1007
    ws.close()
    unhurt(gw, kernel)


PROTOCOL_ERRORS = {
    "reserved opcode": lambda w: w.frame(3, b"x"), "reserved control": lambda w: w.frame(11, b""),
    "rsv bits": lambda w: w.frame(W.TEXT, b"{}", rsv=4), "fragmented ping": lambda w: w.frame(W.PING, b"x", fin=False),
    "long ping": lambda w: w.frame(W.PING, b"x" * 126), "continuation of nothing": lambda w: w.frame(W.MORE, b"x"),
    "text inside text": lambda w: w.frame(W.TEXT, b"{", fin=False) + w.frame(W.TEXT, b"}"),
    "64 bit length": lambda w: bytes([0x81, 0xff]) + b"\xff" * 8 + bytes(4),
    "no mask": lambda w: w.frame(W.TEXT, b"{}", mask=False), "no mask on a ping": lambda w: w.frame(W.PING, b"", mask=False),
}


@pytest.mark.parametrize("name", PROTOCOL_ERRORS)
def test_protocol_errors_end_that_socket(gw, kernel, name):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="proto")
    ws.send_bytes(PROTOCOL_ERRORS[name](ws))
    assert outcome(ws) == (1009 if name == "64 bit length" else 1002)
    assert wire.closed(ws.s)
    unhurt(gw, kernel)


def test_messages_over_the_limit_are_1009(fresh):
    g = fresh("--max-ws-message", "1")
    k = g.kernel()
    for parts in (1, 40):
        ws = wire.Kernel(g, k, ALICE, session=f"big{parts}")
        data = b'{"x":"' + b"y" * (1 << 20) + b'"}'
        step = len(data) // parts + 1
        try:
            for i in range(0, len(data), step):
                ws.send_bytes(ws.frame(W.TEXT if i == 0 else W.MORE, data[i:i + step], fin=i + step >= len(data)))
        except ConnectionError:
            pass
        assert outcome(ws) == 1009
        ws.close()
    # A length that is only claimed is refused at once.
    ws = wire.Kernel(g, k, ALICE, session="claim")
    ws.send_bytes(ws.frame(W.TEXT, b"{" * 1000, length=1 << 40))
    assert ws.close_code() == 1009
    ws.s.close()
    with wire.Kernel(g, k, ALICE) as ws:
        assert ws.run("echo fine")


def test_truncated_frames_and_sudden_ends(gw, kernel):
    before = gw.fds()
    good = json.dumps({**wire.execute("echo x"), "buffers": []}).encode()
    rnd = random.Random(7)
    for i in range(60):
        ws = wire.Kernel(gw, kernel[0], ALICE, session=f"cut{i % 4}", v1=bool(i % 2))
        whole = ws.frame(W.TEXT, good) + ws.frame(W.BINARY, wire.to_v1(wire.execute("echo y")))
        ws.send_bytes(whole[:rnd.randrange(len(whole))])
        (ws.abort if i % 3 else ws.s.close)()
    unhurt(gw, kernel)
    wire.wait_for(lambda: gw.model(kernel[0])["connections"] == 1)
    wire.wait_for(lambda: gw.fds() <= before + 3)


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=strategies.binary(max_size=300), v1=strategies.booleans())
def test_random_messages_never_hurt(gw, kernel, data, v1):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="rnd", v1=v1)
    ws.send(data, W.BINARY)
    assert outcome(ws) in (None, 1007, 1009)
    ws.close()


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=strategies.binary(min_size=1, max_size=200))
def test_random_bytes_on_the_wire_never_hurt(gw, kernel, data):
    ws = wire.Kernel(gw, kernel[0], ALICE, session="noise")
    try:
        ws.send_bytes(data)
        ws.s.settimeout(0.02)
        ws.read()
    except (EOFError, OSError, AssertionError):
        pass
    ws.s.close()
    unhurt(gw, kernel)


def test_mutated_messages_never_hurt(gw, kernel):
    rnd = random.Random(int(os.environ.get("CV_TEST_SEED", "1")))
    for i in range(150):
        v1 = bool(i % 2)
        m = wire.execute("echo mutant", "mut")
        data = bytearray(wire.to_v1(m, [b"b"]) if v1 else json.dumps({**m, "buffers": []}).encode())
        for _ in range(rnd.randrange(1, 5)):
            at = rnd.randrange(len(data))
            if rnd.random() < 0.5:
                data[at] = rnd.randrange(256)
            else:
                del data[at:at + rnd.randrange(1, 20)]
            if not data:
                data = bytearray(b"x")
        ws = wire.Kernel(gw, kernel[0], ALICE, session="mut", v1=v1)
        ws.send(bytes(data), W.BINARY)
        assert outcome(ws) in (None, 1007, 1009)
        ws.close()
    unhurt(gw, kernel)
