"""Stand-in for QEMU in unit tests: answers --version, speaks QMP on descriptor 4.

First argument: how it behaves.
  ok            as QEMU would
  crash         ends with code 3 and a line on stderr before the greeting
  silent        accepts and says nothing
  garbage       greets with something that is no JSON
  badid         answers every command with the wrong id
  refuse        answers migrate-incoming with an error
  dieload       ends with code 1 while it loads the state
  nodone        never finishes the load
  poweroff      the guest shuts down after it was resumed
  console       writes a megabyte to its console (descriptor 7)
  probe-ok      exits with 99 at once; probe-fail: with 1; probe-hang: never
  noversion     --version prints something else
"""
import array
import json
import os
import socket
import sys
import time

mode, argv = sys.argv[1], sys.argv[2:]


def version():
    if mode == "noversion":
        print("some other program 1.0")
        return
    print("QEMU emulator version 7.2.99 (fake)")


class Qmp:
    def __init__(self):
        listener = socket.socket(fileno=4)
        listener.setblocking(True)
        self.sock, _ = listener.accept()
        self.buf = b""
        self.fds = []

    def send(self, obj):
        self.sock.sendall(json.dumps(obj).encode() + b"\r\n")

    def commands(self):
        decoder = json.JSONDecoder()
        while True:
            data, ancillary, _, _ = self.sock.recvmsg(65536, 1024)
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                    self.fds += list(fds)
            if not data:
                return
            self.buf += data
            text = self.buf.decode()
            while text.strip():
                try:
                    obj, end = decoder.raw_decode(text.lstrip())
                except ValueError:
                    break
                text = text.lstrip()[end:]
                yield obj
            self.buf = text.encode()


def run(qmp, command):
    name, reply = command["execute"], {"return": {}, "id": command["id"]}
    if mode == "badid" and name != "qmp_capabilities":
        reply["id"] += 1
    if mode == "refuse" and name == "migrate-incoming":
        reply = {"error": {"class": "GenericError", "desc": "this is not my state"}, "id": command["id"]}
    qmp.send(reply)
    if name == "migrate-incoming" and mode not in ("refuse", "nodone"):
        if mode == "dieload":
            sys.stderr.write("qemu-system-x86_64: load of migration failed: Invalid argument\n")
            sys.stderr.flush()
            os._exit(1)
        state = os.read(qmp.fds[-1], 1 << 20)
        if state != b"fake state":
            sys.stderr.write("foreign state\n")
            sys.stderr.flush()
            os._exit(1)
        qmp.send({"event": "MIGRATION", "data": {"status": "active"}})
        qmp.send({"event": "MIGRATION", "data": {"status": "completed"}})
    if name == "migrate":
        os.write(qmp.fds[-1], b"fake state")
        qmp.send({"event": "MIGRATION", "data": {"status": "completed"}})
    if name == "cont" and mode == "poweroff":
        qmp.send({"event": "SHUTDOWN", "data": {"guest": True, "reason": "guest-shutdown"}})
        os._exit(0)
    if name == "cont" and mode == "console":
        con = socket.socket(fileno=7)
        con.setblocking(True)
        for i in range(16):
            con.sendall(b"x" * 65535 + b"\n")
        con.sendall(b"Kernel panic - not syncing\n")


def main():
    if "--version" in argv:
        return version()
    if mode == "crash":
        sys.stderr.write("qemu-system-x86_64: could not do it\n")
        sys.exit(3)
    if mode.startswith("probe"):
        if mode == "probe-hang":
            time.sleep(600)
        if mode == "probe-fail":
            sys.stderr.write("Could not access KVM kernel module: Permission denied\n")
        sys.exit(99 if mode == "probe-ok" else 1)
    qmp = Qmp()
    if mode == "silent":
        time.sleep(600)
    if mode == "garbage":
        qmp.sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        time.sleep(600)
    qmp.send({"QMP": {"version": {"qemu": {"micro": 99, "minor": 2, "major": 7}}, "capabilities": []}})
    for command in qmp.commands():
        run(qmp, command)


main()
