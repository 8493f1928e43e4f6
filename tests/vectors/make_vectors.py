#!/usr/bin/env python3
"""Golden vectors for proto/, made by the reference implementation of the protocol.

Needs jupyter_client >= 8 and jupyter_server >= 2 (pip install jupyter_client jupyter_server).
Output is the same on every run: ids and dates are fixed. All bytes are base64.

    python3 make_vectors.py            # rewrites *.json beside this file
"""
import base64
import json
import os
import warnings

from jupyter_client.session import Session, json_packer
from jupyter_server.services.kernels.connection.base import (
    serialize_binary_message,
    serialize_msg_to_ws_v1,
)

HERE = os.path.dirname(os.path.abspath(__file__))
DATE = "2026-01-31T12:00:00.000000Z"
PARTS = ("header", "parent_header", "metadata", "content")


def b64(data):
    return base64.b64encode(bytes(data)).decode("ascii")


def ascii_packer(obj):
    """Escapes everything beyond ASCII (and so lone surrogates); lets NaN through, as old kernels do."""
    return json.dumps(obj, ensure_ascii=True, allow_nan=True).encode("ascii")


def header(msg_type, **more):
    h = {
        "msg_id": more.pop("msg_id", "5f0c6ab1-0b9f-4a3b-9b58-6d9ef6b4a3f1_17_1"),
        "msg_type": msg_type,
        "username": "ada",
        "session": "0b9f5f0c-6ab1-4a3b-9b58-b4a3f16d9ef6",
        "date": DATE,
        "version": "5.3",
    }
    h.update(more)
    return h


def message(head, parent=None, metadata=None, content=None, buffers=()):
    return {
        "header": head,
        "msg_id": head["msg_id"],
        "msg_type": head["msg_type"],
        "parent_header": parent or {},
        "metadata": metadata or {},
        "content": content if content is not None else {},
        "buffers": list(buffers),
    }


def strict(obj):
    """The value as a strict JSON reader may see it: non-finite numbers are null, lone surrogates
    U+FFFD."""
    if isinstance(obj, float) and (obj != obj or obj in (float("inf"), float("-inf"))):
        return None
    if isinstance(obj, str):
        return obj.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(obj, dict):
        return {strict(k): strict(v) for k, v in obj.items()}
    if isinstance(obj, list):
        return [strict(v) for v in obj]
    return obj


def vector(name, channel, msg, key=b"secret", packer=json_packer, idents=(), comparable=True):
    """One message in all its framings. comparable: its legacy text may be compared as a value."""
    session = Session(key=key, check_pid=False)
    session.pack = packer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frames = session.serialize(msg, ident=list(idents)) + msg["buffers"]
    start = frames.index(b"<IDS|MSG>") + 1
    raw = frames[start + 1 : start + 5]
    v = {
        "name": name,
        "channel": channel,
        "key": b64(key),
        "n_idents": start - 1,
        "zmq": [b64(f) for f in frames],
        "signature": frames[start].decode("ascii"),
        "parts": [b64(p) for p in raw],
        "buffers": [b64(b) for b in msg["buffers"]],
        "ws_v1": b64(serialize_msg_to_ws_v1(raw + msg["buffers"], channel)),
        "ids": {
            "msg_id": msg["header"]["msg_id"],
            "msg_type": msg["header"]["msg_type"],
            "session": msg["header"]["session"],
            "username": msg["header"]["username"],
            "subshell": msg["header"].get("subshell_id") or "",
            "parent_id": msg["parent_header"].get("msg_id", ""),
            "parent_type": msg["parent_header"].get("msg_type", ""),
            "parent_session": msg["parent_header"].get("session", ""),
        },
        "status": msg["content"].get("execution_state", "") if channel == "iopub" else "",
    }
    client = {k: msg[k] for k in PARTS}
    client["channel"] = channel
    v["legacy_parts"] = [b64(json.dumps(msg[k]).encode("utf8")) for k in PARTS]
    if msg["buffers"]:
        v["ws_legacy"] = b64(serialize_binary_message({**client, "buffers": msg["buffers"]}))
        texts = [base64.b64encode(b).decode() for b in msg["buffers"]]
        v["ws_legacy_base64"] = b64(json.dumps({**client, "buffers": texts}).encode("utf8"))
    else:
        v["ws_legacy"] = b64(json.dumps({**client, "buffers": []}).encode("utf8"))
    if comparable:
        whole = {**client, "msg_id": msg["msg_id"], "msg_type": msg["msg_type"]}
        v["strict_value"] = b64(json.dumps(strict(whole), ensure_ascii=False).encode("utf8"))
    return v


def nested(depth):
    value = 1
    for i in range(depth):
        value = [value] if i % 2 else {"d": value}
    return {"deep": value}


def messages():
    ask = header("execute_request", msg_id="ask-1")
    code = {"code": "print('hi')", "silent": False, "store_history": True, "user_expressions": {},
            "allow_stdin": True, "stop_on_error": True}
    odd = {"text": "caf\u00e9 \u4e2d\u6587 \U0001f600 e\u0301 \u2028\u2029 \u202e \ufeff \x7f",
           "quotes": "\"\\/\b\f\n\r\t", "nul": "a\0b", "low": "\x01\x1f", "": "empty key",
           "\u043a\u043b\u044e\u0447": [True, False, None]}
    big = {"int": 2**80, "neg": -(2**63) - 1, "float": 1e-300, "zero": -0.0, "third": 1 / 3}
    nan = {"data": {"text/plain": "NaN"}, "values": [float("nan"), float("inf"), -float("inf"), 1.5],
           "NaN": {"Infinity": "-Infinity"}, "s": "a \"NaN\" b"}
    bufs = [b"", bytes(range(256)), b"\0" * 7, b"{\"not\": json}"]
    yield vector("plain request", "shell", message(ask, content=code))
    yield vector("no key", "shell", message(ask, content=code), key=b"")
    yield vector("key longer than a hash block", "shell", message(ask, content=code),
                 key=bytes(range(1, 201)))
    yield vector("routing identities", "shell", message(ask, content=code),
                 idents=[b"client-1", b"\x00\xff"])
    yield vector("iopub topic", "iopub",
                 message(header("status", msg_id="s-1"), ask, content={"execution_state": "idle"}),
                 idents=[b"kernel.abc.status"])
    yield vector("status without parent", "iopub",
                 message(header("status"), content={"execution_state": "starting"}))
    yield vector("empty objects", "control", message(header("kernel_info_request")))
    yield vector("odd unicode", "iopub", message(header("display_data"), ask, content=odd))
    yield vector("odd unicode, escaped", "iopub", message(header("display_data"), ask, content=odd),
                 packer=ascii_packer)
    yield vector("lone surrogates, escaped", "iopub",
                 message(header("stream"), ask,
                         content={"name": "stdout", "text": "\ud800 \udfff x\udc00\ud800y \ud83d\ude00"}),
                 packer=ascii_packer, comparable=False)
    yield vector("lone surrogates as raw bytes", "iopub",
                 message(header("stream"), ask, content={"name": "stdout", "text": "a\udc80\udcffb"}))
    yield vector("NaN and Infinity", "iopub", message(header("execute_result"), ask, content=nan),
                 packer=ascii_packer)
    yield vector("numbers beyond 64 bits", "iopub", message(header("display_data"), ask, content=big),
                 comparable=False)
    yield vector("binary buffers", "iopub",
                 message(header("comm_msg"), ask, {"m": 1}, {"comm_id": "c", "data": {}}, bufs))
    yield vector("binary buffers to the kernel", "shell",
                 message(header("comm_open"), content={"comm_id": "c", "target_name": "t"},
                         buffers=[b"\xff\xfe" * 50]))
    yield vector("one empty buffer", "iopub", message(header("comm_msg"), ask, buffers=[b""]))
    yield vector("300 buffers", "iopub",
                 message(header("comm_msg"), ask, buffers=[bytes([i % 256]) * (i % 5) for i in range(300)]))
    yield vector("deep nesting", "iopub", message(header("display_data"), ask, content=nested(400)))
    yield vector("subshell", "shell", message(header("execute_request", subshell_id="sub-1"), content=code))
    yield vector("null subshell", "shell", message(header("execute_request", subshell_id=None), content=code))
    yield vector("unicode ids", "shell", message(header("execute_request", msg_id="\u00fc\"\\\U0001f600"),
                                                 content=code))
    yield vector("input reply", "stdin", message(header("input_reply"), header("input_request", msg_id="in-1"),
                                                 content={"value": "42\n"}))
    yield vector("unknown header keys", "shell",
                 message(header("execute_request", x_trace={"a": [1, 2, {"b": "}"}]}, zz=None), content=code))


def signatures():
    session = Session(key=b"secret")
    cases = [(b"secret", [b"{}"] * 4), (b"secret", [b"", b"", b"", b""]), (b"\0", [b"{}", b"", b"{}", b"\xff"]),
             (b"k" * 64, [b"a", b"b", b"c", b"d"]), (b"k" * 65, [b"a" * 1000, b"", b"", b""]),
             ("schl\u00fcssel".encode(), [b"{\"msg_id\": 1}", b"{}", b"{}", b"{}"])]
    for key, parts in cases:
        session.key = key
        yield {"key": b64(key), "parts": [b64(p) for p in parts], "signature": session.sign(parts).decode()}
    session.key = b""
    yield {"key": "", "parts": [b64(b"{}")] * 4, "signature": session.sign([b"{}"] * 4).decode()}


def strings():
    """JSON string literals and what they decode to: lone surrogates and NUL are U+FFFD."""
    texts = ['""', '"abc"', '"caf\u00e9"', r'"\u00e9\u4e2d\ud83d\ude00"', r'"\ud800"', r'"\udc00\ud800"',
             r'"\ud800\ud83d\ude00"', r'"\ud83dx\ude00"', r'"\"\\\/\b\f\n\r\t"', r'"a\u0000b"', '"\U0001f600"',
             r'"\uD83D\uDE00\uFFFF"']
    for text in texts:
        value = strict(json.loads(text)).replace("\0", "\ufffd")
        yield {"json": b64(text.encode("utf8")), "text": b64(value.encode("utf8"))}


def nonfinite():
    texts = ["{}", "[NaN]", '{"a":-Infinity}', '{"a": Infinity }', '{"NaN":"Infinity"}', '["-Infinity", "\\"NaN"]',
             '{"a":[1,2,{"b":[NaN]}]}', "NaN", '"NaN"', '{"a":"\\\\",  "b":NaN}', '{"a":1e5,"b":-1.5E+3,"c":null}']
    for text in texts:
        seen = []
        json.loads(text, parse_constant=seen.append)
        yield {"json": b64(text.encode()), "nonfinite": bool(seen)}


def write(name, value):
    with open(os.path.join(HERE, name), "w", encoding="ascii") as f:
        json.dump(value, f, indent=1, ensure_ascii=True)
        f.write("\n")


if __name__ == "__main__":
    write("messages.json", list(messages()))
    write("signatures.json", list(signatures()))
    write("json.json", {"strings": list(strings()), "nonfinite": list(nonfinite())})
