"""A websocket client that cuts its frames in odd places: one byte at a time, in the middle of the offset
table, with pings between fragments, empty fragments, several messages in one write. What goes in odd must
come out as ordinary answers."""
import base64
import json
import os
import random
import socket
import struct
import urllib.parse
import urllib.request
import uuid

import pytest

V1 = "v1.kernel.websocket.jupyter.org"
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


class Raw:
    """RFC 6455 by hand, so that every fragment and every write is ours."""

    def __init__(self, server, kernel, protocol=V1):
        url = urllib.parse.urlparse(server.url)
        self.sock = socket.create_connection((url.hostname, url.port), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.session = uuid.uuid4().hex
        head = [f"GET /api/kernels/{kernel}/channels?session_id={self.session} HTTP/1.1",
                f"Host: {url.netloc}", "Upgrade: websocket", "Connection: Upgrade",
                f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
                "Sec-WebSocket-Version: 13", f"Authorization: token {server.token}"]
        if protocol:
            head.append(f"Sec-WebSocket-Protocol: {protocol}")
        self.sock.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.sock.recv(4096)
        answer, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        assert answer.startswith(b"HTTP/1.1 101"), answer
        self.v1 = protocol is not None and V1.encode() in answer
        assert self.v1 == (protocol is not None)

    @staticmethod
    def frame(opcode, payload, fin=True):
        mask = os.urandom(4)
        size = len(payload)
        head = bytes([opcode | (0x80 if fin else 0)])
        if size < 126:
            head += bytes([0x80 | size])
        elif size < 65536:
            head += struct.pack(">BH", 0x80 | 126, size)
        else:
            head += struct.pack(">BQ", 0x80 | 127, size)
        masked = bytes(b ^ mask[i & 3] for i, b in enumerate(payload))
        return head + mask + masked

    def message(self, kind, content, channel="shell"):
        header = {"msg_id": uuid.uuid4().hex, "session": self.session, "username": "raw", "version": "5.3",
                  "msg_type": kind, "date": "2026-01-01T00:00:00.000000Z"}
        if not self.v1:
            body = {"header": header, "parent_header": {}, "metadata": {}, "content": content,
                    "channel": channel, "buffers": []}
            return header["msg_id"], TEXT, json.dumps(body).encode()
        parts = [channel.encode()] + [json.dumps(p).encode() for p in (header, {}, {}, content)]
        offsets = [8 * (len(parts) + 2)]
        for part in parts:
            offsets.append(offsets[-1] + len(part))
        table = struct.pack(f"<{len(offsets) + 1}Q", len(offsets), *offsets)
        return header["msg_id"], BINARY, table + b"".join(parts)

    def exactly(self, n):
        while len(self.buffer) < n:
            data = self.sock.recv(65536)
            assert data, "closed by the server"
            self.buffer += data
        out, self.buffer = self.buffer[:n], self.buffer[n:]
        return out

    def receive(self):
        """(opcode, payload) of the next whole message; control frames come as they are."""
        whole, kind = b"", None
        while True:
            first, second = self.exactly(2)
            size = second & 127
            if size == 126:
                size = struct.unpack(">H", self.exactly(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self.exactly(8))[0]
            assert not second & 128, "servers do not mask"
            payload = self.exactly(size)
            opcode = first & 15
            if opcode >= CLOSE:
                return opcode, payload
            kind = opcode or kind
            whole += payload
            if first & 0x80:
                return kind, whole

    def decode(self, opcode, data):
        if not self.v1:
            assert opcode == TEXT
            message = json.loads(data)
            return message["channel"], message["header"], message["parent_header"], message["content"]
        assert opcode == BINARY
        n = struct.unpack_from("<Q", data)[0]
        o = struct.unpack_from(f"<{n}Q", data, 8)
        assert o[-1] == len(data)
        parts = [data[a:b] for a, b in zip(o, o[1:])]
        return parts[0].decode(), json.loads(parts[1]), json.loads(parts[2]), json.loads(parts[4])

    def until_done(self, *wanted):
        """Collect output until reply and idle of all these requests are there, whatever their order (shell and
        iopub are different sockets of the kernel)."""
        seen = {w: {"text": "", "reply": None, "idle": False} for w in wanted}
        pongs = []
        while not all(s["reply"] and s["idle"] for s in seen.values()):
            opcode, data = self.receive()
            if opcode == PING:
                self.sock.sendall(self.frame(PONG, data))
                continue
            if opcode == PONG:
                pongs.append(data)
                continue
            assert opcode != CLOSE, data
            channel, header, parent, content = self.decode(opcode, data)
            one = seen.get(parent.get("msg_id"))
            if one is None:
                continue
            if header["msg_type"] == "stream":
                one["text"] += content["text"]
            elif header["msg_type"] == "status":
                one["idle"] = content["execution_state"] == "idle"
            elif channel == "shell":
                one["reply"] = content
        return [(s["text"], s["reply"]) for s in seen.values()], pongs

    def text_of(self, wanted):
        [(text, _)], _ = self.until_done(wanted)
        return text


@pytest.fixture(scope="module")
def kernel(server):
    def call(method, path):
        request = urllib.request.Request(server.url + path, method=method, data=b"{}",
                                         headers={"Authorization": f"token {server.token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    found = json.loads(call("POST", "api/kernels"))["id"]
    yield found
    call("DELETE", f"api/kernels/{found}")


@pytest.fixture(params=[V1, None], ids=["v1", "legacy"])
def ws(request, server, kernel):
    raw = Raw(server, kernel, request.param)
    yield raw
    raw.sock.close()


def request_for(ws, code):
    return ws.message("execute_request", {"code": code, "silent": False, "store_history": False,
                                          "user_expressions": {}, "allow_stdin": False})


def test_one_byte_fragments_are_joined(ws):
    wanted, opcode, data = request_for(ws, "print('a' * 3)")
    frames = [ws.frame(opcode if i == 0 else CONT, data[i:i + 1], i == len(data) - 1)
              for i in range(len(data))]
    ws.sock.sendall(b"".join(frames))
    [(text, reply)], _ = ws.until_done(wanted)
    assert (text, reply["status"]) == ("aaa\n", "ok")


def test_writes_may_end_anywhere_in_a_frame(ws):
    wanted, opcode, data = request_for(ws, "print('b' * 3)")
    wire = ws.frame(opcode, data)
    for i in range(0, len(wire), 3):
        ws.sock.sendall(wire[i:i + 3])
    assert ws.text_of(wanted) == "bbb\n"


def test_pings_between_fragments_are_answered(ws):
    wanted, opcode, data = request_for(ws, "print('c' * 3)")
    middle = len(data) // 2
    ws.sock.sendall(ws.frame(opcode, data[:middle], False) + ws.frame(PING, b"between")
                    + ws.frame(CONT, b"", False) + ws.frame(CONT, data[middle:]))
    [(text, _)], pongs = ws.until_done(wanted)
    assert text == "ccc\n"
    assert pongs == [b"between"]


def test_many_messages_in_one_write_are_all_answered_in_order(ws):
    asked = [request_for(ws, f"print({n})") for n in range(30)]
    ws.sock.sendall(b"".join(ws.frame(opcode, data) for _, opcode, data in asked))
    answers, _ = ws.until_done(*(wanted for wanted, _, _ in asked))
    assert [text for text, _ in answers] == [f"{n}\n" for n in range(30)]


def test_random_cuts_of_a_large_message(ws):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    cut = random.Random(seed)
    size = 300_000
    wanted, opcode, data = request_for(ws, f"print(len('{'x' * size}'))")
    wire, start = b"", 0
    while start < len(data):
        end = min(len(data), start + cut.choice([0, 1, 7, 125, 126, 4096, 65535, 65536, 100_000]))
        wire += ws.frame(CONT if start or wire else opcode, data[start:end], end == len(data))
        start = end
    start = 0
    while start < len(wire):
        end = start + cut.randrange(1, 20_000)
        ws.sock.sendall(wire[start:end])
        start = end
    assert ws.text_of(wanted) == f"{size}\n"


def test_empty_frames_do_not_hurt(ws):
    ws.sock.sendall(ws.frame(TEXT, b"") + ws.frame(BINARY, b"") + ws.frame(PONG, b"unasked"))
    wanted, opcode, data = request_for(ws, "print('still here')")
    ws.sock.sendall(ws.frame(opcode, data))
    assert ws.text_of(wanted) == "still here\n"


@pytest.mark.parametrize("junk", [b"not json", b"{", b"\x00\x00\x00\x02", b"\xff" * 64],
                         ids=["words", "cut", "table", "ones"])
def test_junk_is_answered_with_a_close_code_and_the_kernel_lives_on(server, kernel, junk):
    for protocol in (V1, None):
        raw = Raw(server, kernel, protocol)
        raw.sock.sendall(raw.frame(BINARY, junk))
        opcode, data = raw.receive()
        while opcode != CLOSE:
            opcode, data = raw.receive()
        assert struct.unpack_from(">H", data)[0] in (1002, 1003, 1007, 1008, 1009)
        raw.sock.close()
    raw = Raw(server, kernel)
    wanted, opcode, data = request_for(raw, "print('alive')")
    raw.sock.sendall(raw.frame(opcode, data))
    assert raw.text_of(wanted) == "alive\n"
    raw.sock.close()
