"""The host's side of the guest link and a fixture that runs `cellvisor-shim --local`: enough of
proto/gl.h and proto/jp_msg.h (frame header, credit, GL_KERNEL_MSG bodies) to drive a shim by hand.
Every wait has a deadline; nothing sleeps."""

import base64
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
import uuid

HELLO, SPECS, PREPARE, PREPARED, RESUME, RESUMED, ASSIGN, ASSIGNED, SHUTDOWN = range(1, 10)
PING, PONG, LOG, EVENT, CREDIT = range(10, 15)
START, STATE, CTL, DONE, MSG, OUT = range(16, 22)
WINDOW, FRAME_MAX = 4 << 20, 64 << 10
CHANNELS = ("shell", "control", "stdin", "iopub")
DEADLINE = float(os.environ.get("CV_TEST_DEADLINE", "60"))


class LinkError(Exception):
    pass


def check_word(length, kind, flags, stream):
    total = length * 0x9E3779B1 + (kind | flags << 8) * 0x85EBCA77 + stream * 0xC2B2AE3D
    return (total & 0xFFFFFFFF) >> 16


class Link:
    """One connection. Messages are kept in arrival order in `inbox`."""

    def __init__(self, sock):
        self.sock = sock
        sock.setblocking(False)
        self.pending = b""
        self.parts = {}  # stream -> (kind, bytes so far)
        self.inbox = []
        self.reading = True  # False: leave the window shut, do not read
        self.grant = True
        self.owed = {}
        self.eof = False

    def send(self, kind, stream=0, body=b""):
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        out = b""
        while True:
            piece, body = body[:FRAME_MAX], body[FRAME_MAX:]
            flags = 1 if body else 0
            check = check_word(len(piece), kind, flags, stream)
            out += struct.pack("<IBBHI", len(piece), kind, flags, check, stream) + piece
            if not body:
                break
        self.send_raw(out)

    def send_raw(self, data):
        end = time.monotonic() + DEADLINE
        while data:
            _, writable, _ = select.select([], [self.sock], [], 1)
            if writable:
                data = data[self.sock.send(data) :]
            if time.monotonic() > end:
                raise LinkError("the shim does not read")

    def poll(self, timeout):
        """Take what has arrived; wait at most timeout for something."""
        ready, _, _ = select.select([self.sock], [], [], timeout)
        if not ready:
            return
        data = self.sock.recv(1 << 20)
        if not data:
            self.eof = True
            return
        data, at = self.pending + data, 0
        while len(data) - at >= 12:
            length, kind, flags, check, stream = struct.unpack_from("<IBBHI", data, at)
            assert check == check_word(length, kind, flags, stream), "lost step"
            assert length <= FRAME_MAX
            if len(data) - at < 12 + length:
                break
            self.take(kind, flags, stream, data[at + 12 : at + 12 + length])
            at += 12 + length
        self.pending = data[at:]

    def take(self, kind, flags, stream, body):
        if kind in (MSG, OUT) and self.grant:
            owed = self.owed[stream] = self.owed.get(stream, 0) + len(body)
            if owed >= WINDOW // 4:
                self.send(CREDIT, stream, struct.pack("<I", owed))
                self.owed[stream] = 0
        so_far = self.parts.pop(stream, b"") if kind not in (CREDIT, DONE) else b""
        if flags & 1:
            self.parts[stream] = so_far + body
            return
        if kind != CREDIT:
            self.inbox.append(Frame(kind, stream, so_far + body))

    def wait(self, want, timeout=None):
        """The first frame (in order of arrival) that satisfies want; it leaves the inbox."""
        end = time.monotonic() + (timeout or DEADLINE)
        seen = 0
        while True:
            for i in range(seen, len(self.inbox)):
                if want(self.inbox[i]):
                    return self.inbox.pop(i)
            seen = len(self.inbox)
            if self.eof:
                raise LinkError("the shim closed the link")
            left = end - time.monotonic()
            if left <= 0:
                raise LinkError("nothing of that kind; got: " + ", ".join(map(str, self.inbox[-12:])))
            self.poll(left)

    def wait_kind(self, kind, stream=0, timeout=None):
        return self.wait(lambda f: f.kind == kind and f.stream == stream, timeout)

    def quiet(self, seconds):
        """Read for this long (to prove that something does not come)."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.poll(left)


class Frame:
    def __init__(self, kind, stream, body):
        self.kind, self.stream, self.body = kind, stream, body

    @functools.cached_property
    def json(self):
        return json.loads(self.body)

    @functools.cached_property
    def msg(self):
        return Message.decode(self.body)

    def __str__(self):
        if self.kind == MSG:
            return str(self.msg)
        return f"{self.kind}/{self.stream}:{self.body[:120]!r}"


class Message:
    def __init__(self, channel, header, parent, metadata, content, buffers=()):
        self.channel, self.header, self.parent = channel, header, parent
        self.metadata, self.content, self.buffers = metadata, content, list(buffers)

    @property
    def type(self):
        return self.header["msg_type"]

    @property
    def parent_id(self):
        return self.parent.get("msg_id")

    def encode(self):
        parts = [json.dumps(p).encode() for p in (self.header, self.parent, self.metadata, self.content)]
        parts += self.buffers
        head = struct.pack("<BBH", CHANNELS.index(self.channel), 0, len(parts))
        head += b"".join(struct.pack("<I", len(p)) for p in parts)
        return head + b"".join(parts)

    @classmethod
    def decode(cls, body):
        channel, _, n = struct.unpack("<BBH", body[:4])
        sizes = struct.unpack(f"<{n}I", body[4 : 4 + 4 * n])
        parts, at = [], 4 + 4 * n
        for size in sizes:
            parts.append(body[at : at + size])
            at += size
        return cls(CHANNELS[channel], *(json.loads(p or b"{}") for p in parts[:4]), parts[4:])

    def __str__(self):
        return f"{self.channel}:{self.type}:{str(self.content)[:160]}"


class Shim:
    """A shim process in local mode with a link to it."""

    def __init__(self, binary, run_dir, jupyter_path=None, env=None, hello=True):
        ours, theirs = socket.socketpair()
        environ = dict(os.environ, CELLVISOR_LOG="debug")
        for name in ("JUPYTER_PATH", "PYTHONPATH"):
            environ.pop(name, None)
        if jupyter_path:
            environ["JUPYTER_PATH"] = str(jupyter_path)
        environ.update(env or {})
        self.log = open(os.path.join(run_dir, "shim.log"), "wb")
        self.process = subprocess.Popen(
            [binary, "--local", "--link-fd", str(theirs.fileno()), "--run-dir", os.path.join(run_dir, "r")],
            pass_fds=[theirs.fileno()], stderr=self.log, stdin=subprocess.DEVNULL, env=environ,
        )
        theirs.close()
        self.link = Link(ours)
        if hello:
            self.hello()

    def hello(self):
        self.link.send(HELLO, 0, {"version": 1, "role": "host"})
        self.greeting = self.link.wait_kind(HELLO).json
        self.specs = self.link.wait_kind(SPECS).json
        return self.greeting

    def assign(self, **args):
        self.link.send(ASSIGN, 0, args)
        return self.link.wait_kind(ASSIGNED).json

    def start(self, spec, stream=1, env=None, cwd=None, wait=True):
        self.link.send(START, stream, {"spec": spec, "env": env or {}, "cwd": cwd})
        kernel = Kernel(self, stream)
        if wait:
            kernel.wait_state("running")
        return kernel

    def log_text(self):
        with open(self.log.name, errors="replace") as f:
            return f.read()

    def close(self, timeout=10):
        """End by closing the link; the exit code (0 = as it should be)."""
        self.link.sock.close()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            code = "timeout"
        self.log.close()
        return code


class Kernel:
    def __init__(self, shim, stream):
        self.shim, self.link, self.stream = shim, shim.link, stream
        self.session = uuid.uuid4().hex
        self.ops = 0

    def wait_state(self, state, timeout=None):
        def want(f):
            return f.kind == STATE and f.stream == self.stream

        while True:
            got = self.link.wait(want, timeout).json
            if got["state"] == state:
                return got
            if got["state"] == "exited":
                raise LinkError(f"kernel exited while waiting for {state}: {got}")

    def send(self, kind, content, channel="shell", buffers=(), parent=None):
        header = {
            "msg_id": uuid.uuid4().hex, "session": self.session, "username": "t",
            "date": "2026-01-01T00:00:00.000000Z", "msg_type": kind, "version": "5.3",
        }
        message = Message(channel, header, parent or {}, {}, content, buffers)
        self.link.send(MSG, self.stream, message.encode())
        return header["msg_id"]

    def wait_msg(self, want, timeout=None):
        return self.link.wait(
            lambda f: f.kind == MSG and f.stream == self.stream and want(f.msg), timeout
        ).msg

    def execute(self, code, timeout=None, wait=True, **options):
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {},
                   "allow_stdin": False, "stop_on_error": False, **options}
        msg_id = self.send("execute_request", content)
        return self.collect(msg_id, timeout) if wait else msg_id

    def collect(self, msg_id, timeout=None):
        return Result(self, msg_id, timeout)

    def ctl(self, op, wait=True, timeout=None):
        self.ops += 1
        number = self.ops
        self.link.send(CTL, self.stream, {"id": number, "op": op})
        return self.wait_done(number, timeout) if wait else number

    def wait_done(self, number, timeout=None):
        return self.link.wait(
            lambda f: f.kind == DONE and f.stream == self.stream and f.json["id"] == number, timeout
        ).json


class Result:
    """Everything that one request produced, up to reply and idle."""

    def __init__(self, kernel, msg_id, timeout=None):
        self.kernel, self.msg_id = kernel, msg_id
        self.messages, self.out = [], {1: b"", 2: b""}
        self.reply, idle = None, False
        end = time.monotonic() + (timeout or DEADLINE)
        while not (self.reply and idle):
            frame = kernel.link.wait(self.mine, max(0.001, end - time.monotonic()))
            if frame.kind == OUT:
                self.out[frame.body[0]] += frame.body[1:]
                continue
            if frame.kind == STATE:
                raise LinkError(f"the kernel ended: {frame.json}")
            message = frame.msg
            if message.channel == "iopub":
                self.messages.append(message)
                idle = idle or message.content.get("execution_state") == "idle"
            elif message.channel == "shell":
                self.reply = message

    def mine(self, frame):
        if frame.stream != self.kernel.stream:
            return False
        if frame.kind == OUT:
            return True
        if frame.kind == STATE:
            return frame.json["state"] == "exited"
        return frame.kind == MSG and frame.msg.parent_id == self.msg_id and frame.msg.channel != "stdin"

    def of(self, kind):
        return [m for m in self.messages if m.type == kind]

    def text(self, name="stdout"):
        return "".join(m.content["text"] for m in self.of("stream") if m.content["name"] == name)

    @property
    def status(self):
        return self.reply.content["status"]

    @property
    def value(self):
        results = self.of("execute_result")
        return results[-1].content["data"]["text/plain"] if results else None


def entropy():
    return base64.b64encode(os.urandom(64)).decode()
