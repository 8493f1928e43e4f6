"""Stand-in for QEMU with a guest that speaks the guest link, for the template builder's tests.

QMP is fake_qemu.py's; a thread serves the link on descriptor 5. $FAKE_DIR/guest.mode says how the
guest behaves:
  ok            boots, prepares, and its clone resumes
  preload-fail  the preload raises
  no-kernel     the image has other kernels than the recipe wants
  no-resume     the clone cannot be resumed
  bad-frame     sends bytes that are no frame
  panic         QEMU ends during the boot
"""
import json
import os
import runpy
import socket
import struct
import sys
import threading

HELLO, SPECS, PREPARE, PREPARED, RESUME, RESUMED, LOG = 1, 2, 3, 4, 5, 6, 12
CLONE = "-incoming" in sys.argv


def mode():
    try:
        with open(os.environ["FAKE_DIR"] + "/guest.mode") as f:
            return f.read().strip()
    except OSError:
        return "ok"


def send(sock, kind, obj):
    body = json.dumps(obj).encode()
    total = (len(body) * 0x9E3779B1 + kind * 0x85EBCA77) & 0xFFFFFFFF
    sock.sendall(struct.pack("<IBBHI", len(body), kind, 0, total >> 16, 0) + body)


def read_exact(sock, n):
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def frames(sock):
    while True:
        length, kind, _, _, _ = struct.unpack("<IBBHI", read_exact(sock, 12))
        yield kind, json.loads(read_exact(sock, length))


def boot(sock):
    specs = {"python3": {"spec": {"argv": ["x"], "language": "python"}, "resources": {}}}
    if mode() == "no-kernel":
        specs = {"bash": specs["python3"]}
    send(sock, SPECS, {"default": next(iter(specs)), "kernelspecs": specs})


def answer(sock, kind, body):
    if kind == PREPARE:
        send(sock, LOG, {"level": "info", "text": "running %r" % body["preload"]})
        if mode() == "preload-fail":
            error = "preload line 2: NameError: name 'nope' is not defined"
            send(sock, PREPARED, {"ok": False, "error": error})
        else:
            os.pwrite(3, b"guest memory", 1 << 20)
            send(sock, PREPARED, {"ok": True, "ms": 1, "info": {"banner": "fake"}})
    if kind == RESUME:
        ok = mode() != "no-resume" and len(body["entropy"]) == 88
        send(sock, RESUMED, {"ok": ok, "error": "no entropy device"})


def serve():
    listener = socket.socket(fileno=5)
    listener.setblocking(True)
    while True:
        sock, _ = listener.accept()
        try:
            for kind, body in frames(sock):
                if kind == HELLO:
                    if mode() == "panic" and not CLONE:
                        sys.stderr.write("fake QEMU: no such machine\n")
                        sys.stderr.flush()
                        os._exit(3)
                    if mode() == "bad-frame":
                        sock.sendall(b"x" * 64)
                    send(sock, HELLO, {"version": 1, "role": "guest", "mode": "vm"})
                    if not CLONE:
                        boot(sock)
                else:
                    answer(sock, kind, body)
        except (EOFError, OSError):
            pass


here = os.path.dirname(os.path.abspath(__file__))
if "--version" not in sys.argv:
    threading.Thread(target=serve, daemon=True).start()
sys.argv = ["fake_qemu.py", "ok"] + sys.argv[1:]
runpy.run_path(here + "/fake_qemu.py")
