"""Raw sockets: HTTP as bytes, and a websocket client that can do everything wrong."""
import base64
import json
import os
import re
import socket
import ssl
import struct
import time
import urllib.parse
import uuid

V1 = "v1.kernel.websocket.jupyter.org"


def connect(gw, timeout=10):
    u = urllib.parse.urlsplit(gw.url)
    s = socket.create_connection((u.hostname, u.port), timeout=timeout)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if u.scheme == "https":
        ctx = ssl.create_default_context()
        ctx.check_hostname, ctx.verify_mode = False, ssl.CERT_NONE
        s = ctx.wrap_socket(s)
    return s


def read_response(s, head=False):
    """(status, headers, body) of one response; leaves the socket at the next one."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = s.recv(1)
        if not chunk:
            raise EOFError(data)
        data += chunk
    lines = data.decode("latin-1").split("\r\n")
    status = int(lines[0].split()[1])
    headers = {}
    for line in filter(None, lines[1:]):
        key, value = line.split(":", 1)
        assert key.lower() not in headers or key.lower() == "set-cookie", f"{key} twice"
        headers[key.lower()] = value.strip()
    n = 0 if head or status in (100, 101, 204, 304) else int(headers.get("content-length", 0))
    body = b""
    while len(body) < n:
        chunk = s.recv(n - len(body))
        if not chunk:
            raise EOFError(body)
        body += chunk
    return status, headers, body


def exchange(gw, data, head=False):
    """Send bytes on a new connection, read one response."""
    with connect(gw) as s:
        s.sendall(data)
        return read_response(s, head)


def closed(s, seconds=5):
    """Does the peer end the connection in time?"""
    s.settimeout(seconds)
    try:
        while s.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
    except (TimeoutError, ssl.SSLError):
        return False


class Frame:
    def __init__(self, op, data):
        self.op, self.data = op, data

    @property
    def code(self):
        return struct.unpack(">H", self.data[:2])[0] if len(self.data) >= 2 else None

    @property
    def reason(self):
        return self.data[2:].decode()


class WebSocket:
    """Frames by hand. headers replace or (None) remove those of a good handshake."""
    TEXT, BINARY, CLOSE, PING, PONG, MORE = 1, 2, 8, 9, 10, 0

    def __init__(self, gw, path, token=None, protocols=None, headers=None, timeout=15, rcvbuf=None):
        self.gw = gw
        u = urllib.parse.urlsplit(gw.url)
        if rcvbuf:
            self.s = socket.socket()
            self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
            self.s.settimeout(timeout)
            self.s.connect((u.hostname, u.port))
        else:
            self.s = connect(gw, timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        h = {"Host": u.netloc, "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
             "Sec-WebSocket-Key": key}
        if token:
            h["Authorization"] = f"token {token}"
        if protocols:
            h["Sec-WebSocket-Protocol"] = protocols
        h.update(headers or {})
        lines = [f"GET {u.path}{path} HTTP/1.1"] + [f"{k}: {v}" for k, v in h.items() if v is not None]
        self.s.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        self.status, self.headers, self.body = read_response(self.s)
        self.rx = b""
        self.pings = 0

    @property
    def protocol(self):
        return self.headers.get("sec-websocket-protocol")

    def frame(self, op, data=b"", fin=True, mask=True, rsv=0, length=None):
        n = len(data) if length is None else length
        out = bytes([(0x80 if fin else 0) | rsv << 4 | op])
        bit = 0x80 if mask else 0
        if n < 126:
            out += bytes([bit | n])
        elif n < 65536:
            out += bytes([bit | 126]) + struct.pack(">H", n)
        else:
            out += bytes([bit | 127]) + struct.pack(">Q", n)
        if not mask:
            return out + data
        m = os.urandom(4)
        whole = (m * (len(data) // 4 + 1))[:len(data)]
        return out + m + (int.from_bytes(data, "big") ^ int.from_bytes(whole, "big")).to_bytes(len(data), "big")

    def send(self, data, op=None, **kw):
        if isinstance(data, str):
            data, op = data.encode(), op or self.TEXT
        self.s.sendall(self.frame(op or self.BINARY, data, **kw))

    def send_bytes(self, data):
        self.s.sendall(data)

    def _read(self, n):
        while len(self.rx) < n:
            chunk = self.s.recv(1 << 16)
            if not chunk:
                raise EOFError("closed")
            self.rx += chunk
        out, self.rx = self.rx[:n], self.rx[n:]
        return out

    def read_frame(self):
        b0, b1 = self._read(2)
        assert not b1 & 0x80, "servers do not mask"
        n = b1 & 0x7f
        if n == 126:
            n = struct.unpack(">H", self._read(2))[0]
        elif n == 127:
            n = struct.unpack(">Q", self._read(8))[0]
        f = Frame(b0 & 15, self._read(n))
        f.fin = bool(b0 & 0x80)
        return f

    def read(self, pong=True):
        """Next whole message or close frame; pings are answered."""
        data, op = [], None
        while True:
            f = self.read_frame()
            if f.op == self.PING:
                self.pings += 1
                if pong:
                    self.send(f.data, self.PONG)
            elif f.op == self.PONG:
                continue
            elif f.op == self.CLOSE:
                return f
            else:
                assert (op is None) == (f.op != self.MORE), "fragments out of order"
                op = op or f.op
                data.append(f.data)
                if f.fin:
                    return Frame(op, b"".join(data))

    def close_code(self, seconds=10):
        """Read to the close frame."""
        self.s.settimeout(seconds)
        while True:
            f = self.read()
            if f.op == self.CLOSE:
                return f.code

    def close(self, code=1000):
        try:
            self.send(struct.pack(">H", code), self.CLOSE)
        except OSError:
            pass
        self.s.close()

    def abort(self):
        """Reset instead of an orderly end."""
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.s.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---- Jupyter messages in the three framings ----

def request(kind, content=None, session="s", channel="shell", **extra):
    return {"header": {"msg_id": uuid.uuid4().hex, "msg_type": kind, "session": session, "username": "",
                       "date": "2026-01-01T00:00:00.000000Z", "version": "5.3"},
            "parent_header": {}, "metadata": {}, "content": content or {}, "channel": channel, **extra}


def execute(code, session="s", **content):
    return request("execute_request", {"code": code, "silent": False, "store_history": True, "user_expressions": {},
                                       "allow_stdin": False, "stop_on_error": True, **content}, session)


def to_v1(m, buffers=()):
    parts = [m["channel"].encode()] + [json.dumps(m[k]).encode()
                                       for k in ("header", "parent_header", "metadata", "content")] + list(buffers)
    n = len(parts) + 1
    at, offsets = 8 * (n + 1), []
    for p in parts:
        offsets.append(at)
        at += len(p)
    return struct.pack(f"<{n + 1}Q", n, *offsets, at) + b"".join(parts)


def to_legacy_binary(m, buffers):
    parts = [json.dumps({k: v for k, v in m.items() if k != "buffers"}).encode()] + list(buffers)
    at, offsets = 4 * (len(parts) + 1), []
    for p in parts:
        offsets.append(at)
        at += len(p)
    return struct.pack(f">{len(parts) + 1}I", len(parts), *offsets) + b"".join(parts)


def parse(frame, v1):
    """Message dict with "buffers" as bytes."""
    d = frame.data
    if v1:
        assert frame.op == WebSocket.BINARY
        n = struct.unpack_from("<Q", d)[0]
        o = struct.unpack_from(f"<{n}Q", d, 8)
        assert o[-1] == len(d)
        p = [d[o[i]:o[i + 1]] for i in range(n - 1)]
        m = dict(zip(("header", "parent_header", "metadata", "content"), map(json.loads, p[1:5])))
        m.update(channel=p[0].decode(), buffers=p[5:], msg_type=m["header"]["msg_type"])
        return m
    if frame.op == WebSocket.TEXT:
        m = json.loads(d)
        assert m["msg_id"] == m["header"]["msg_id"] and m["msg_type"] == m["header"]["msg_type"]
        return m
    n = struct.unpack_from(">I", d)[0]
    assert n >= 2, "a binary legacy frame without buffers"
    o = list(struct.unpack_from(f">{n}I", d, 4)) + [len(d)]
    m = json.loads(d[o[0]:o[1]])
    m["buffers"] = [d[o[i]:o[i + 1]] for i in range(1, n)]
    return m


class Kernel(WebSocket):
    """A kernel websocket that speaks messages."""

    def __init__(self, gw, kernel, token, session="s", v1=False, **kw):
        query = f"?session_id={session}" if session is not None else ""
        super().__init__(gw, f"/api/kernels/{kernel}/channels{query}", token,
                         kw.pop("protocols", V1 if v1 else None), **kw)
        self.v1 = self.protocol == V1
        self.session = session

    def submit(self, m, buffers=()):
        if self.v1:
            self.send(to_v1(m, buffers), self.BINARY)
        elif buffers:
            self.send(to_legacy_binary(m, buffers), self.BINARY)
        else:
            self.send(json.dumps({**m, "buffers": []}))
        return m["header"]["msg_id"]

    def message(self):
        f = self.read()
        if f.op == self.CLOSE:
            raise EOFError(f"closed with {f.code} {f.reason}")
        return parse(f, self.v1)

    def until_idle(self, parent, reply=True):
        """All messages up to the idle (and the reply) of this parent."""
        out, idle, replied = [], False, not reply
        while not (idle and replied):
            m = self.message()
            out.append(m)
            if m["parent_header"].get("msg_id") != parent:
                continue
            idle |= m["msg_type"] == "status" and m["content"]["execution_state"] == "idle"
            replied |= m["msg_type"].endswith("_reply")
        return out

    def run(self, code, **content):
        return self.until_idle(self.submit(execute(code, self.session or "s", **content)))


def text_of(messages, stream="stdout"):
    return "".join(m["content"]["text"] for m in messages
                   if m["msg_type"] == "stream" and m["content"]["name"] == stream)


def wait_for(condition, seconds=5, what="condition"):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.02)


ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
