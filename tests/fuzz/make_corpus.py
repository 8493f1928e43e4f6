#!/usr/bin/env python3
"""Seeds for the fuzz targets of proto/, made from the golden vectors (no other packages needed)."""
import base64
import hashlib
import json
import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
VECTORS = os.path.join(HERE, "..", "vectors")
SEED_MAX = 8192
CHANNELS = ["shell", "control", "stdin", "iopub"]


def put(target, data):
    if len(data) > SEED_MAX:
        return
    folder = os.path.join(HERE, "corpus", target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, hashlib.sha1(data).hexdigest()), "wb") as f:
        f.write(data)


def frame(type_, stream, payload, flags=0):
    s = (len(payload) * 0x9E3779B1 + (type_ | flags << 8) * 0x85EBCA77 + stream * 0xC2B2AE3D) & 0xFFFFFFFF
    return struct.pack("<IBBHI", len(payload), type_, flags, s >> 16, stream) + payload


def op(code, a, b, n, more=b""):
    return struct.pack("<BBBH", code, a, b, n) + more


def messages():
    with open(os.path.join(VECTORS, "messages.json"), encoding="ascii") as f:
        for v in json.load(f):
            parts = [base64.b64decode(p) for p in v["parts"]]
            buffers = [base64.b64decode(b) for b in v["buffers"]]
            chan = CHANNELS.index(v["channel"])
            put("jp_ws_v1", base64.b64decode(v["ws_v1"]))
            put("jp_ws_legacy", base64.b64decode(v["ws_legacy"]))
            if "ws_legacy_base64" in v:
                put("jp_ws_legacy", base64.b64decode(v["ws_legacy_base64"]))
            for p in parts:
                put("jp_json", p)
            table = b"".join(struct.pack("<I", len(p)) for p in parts + buffers)
            body = struct.pack("<BBH", chan, 0, len(parts + buffers)) + table + b"".join(parts + buffers)
            put("jp_body", body)
            zmq = [base64.b64decode(f) for f in v["zmq"]]
            for flags in (0, 1, 3):
                put("jp_zmq", bytes([flags | chan << 4]) + b"".join(struct.pack("<H", len(f)) + f for f in zmq))


def scanner():
    with open(os.path.join(VECTORS, "json.json"), encoding="ascii") as f:
        doc = json.load(f)
    for v in doc["strings"] + doc["nonfinite"]:
        text = base64.b64decode(v["json"])
        put("jp_json", text)
        put("jp_json", b'{"a":' + text + b', "b" : [ ' + text + b" ] }")
    put("jp_json", b"{" + b'"d":{' * 300 + b"}" * 301)


def link():
    for role in (0, 1):
        for phase in (0, 1, 2):
            start = bytes([role | phase << 1])
            hello = frame(1, 0, b"{}")
            put("gl_link", start + op(0, len(hello), 3, 0, hello))
            put("gl_link", start + b"".join(op(9, t - 1, 1, 30, b"\5" * 8) for t in range(1, 22)))
            put("gl_link", start + op(0x18, 20, 1, 65535) + op(9, 19, 0, 200, b"\5" * 9) + op(6, 0, 0, 0))
            put("gl_link", start + b"".join(op(3, 7, 4 * k, 60000) + op(5, 0, 0, 100) for k in range(6)))
            put("gl_link", start + op(3, 7, 0, 60000) + op(5, 0, 0, 100) + op(2, 0, 1, 0) + op(6, 0, 0, 0)
                + op(9, 13, 0, 4, struct.pack("<I", 60000)) + op(6, 0, 0, 0))
            put("gl_link", start + op(9, 19, 0, 65535) * 70 + op(1, 0, 1, 65535) + op(6, 0, 0, 0))


if __name__ == "__main__":
    messages()
    scanner()
    link()
