#!/usr/bin/env python3
"""The arrows of docs/ARCHITECTURE.md: a folder includes itself and what is below it, and a library's
header is included only where that library is meant to be known."""
import re

import tree

BELOW = {
    "common": ["common"],
    "proto": ["proto", "common"],
    "vm": ["vm", "proto", "common"],
    "kernelmgr": ["kernelmgr", "vm", "proto", "common"],
    "gateway": ["gateway", "kernelmgr", "proto", "common"],
    "guest-kernel-shim": ["guest-kernel-shim", "proto", "common"],
    "cli": ["cli", "gateway", "kernelmgr", "vm", "proto", "common"],
}
# kernelmgr/ sees machines only through their public face.
ONLY_HEADERS = {("kernelmgr", "vm"): {"vm/vm.h"}}
# header prefix -> regular expression of the files that may include it
CONFINED = {
    "uv.h": r"common/loop\w*\.[ch]|tests/unit/common/loop\w*\.c",
    "libwebsockets.h": r"(?!)",
    "zmq.h": r"guest-kernel-shim/.*|gateway/jupyter/zmq_front\.c|tests/(unit/shim|bench|integration|support)/.*",
    "czmq.h": r"(?!)",
    "sqlite3.h": r"kernelmgr/.*",
    "openssl/ssl.h": r"gateway/http/.*|tests/unit/gateway/.*",
}
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)


def folder_of(path):
    parts = path.parts
    if parts[:2] == ("tests", "unit") and len(parts) > 3:
        return {"shim": "guest-kernel-shim"}.get(parts[2], parts[2])
    return parts[0]


def check(path):
    name = path.as_posix()
    folder = folder_of(path)
    below = BELOW.get(folder)
    for quote, header in INCLUDE.findall(tree.text(path)):
        for confined, where in CONFINED.items():
            if header == confined and not re.fullmatch(where, name):
                yield f"{name}: includes <{header}>, which is confined to {where}"
        if quote == '"' and below:
            target = header.split("/")[0]
            if "/" not in header and path.parts[0] == "tests":
                continue  # a helper beside the test
            if "/" not in header:
                yield f'{name}: "{header}" is not rooted at the top of the tree'
            elif target in BELOW and target not in below:
                yield f"{name}: {folder}/ must not include {header}"
            elif header not in ONLY_HEADERS.get((folder, target), {header}):
                yield f"{name}: {folder}/ may include only {ONLY_HEADERS[(folder, target)]} of {target}/"
            elif header.endswith("_priv.h") and target != folder:
                yield f"{name}: {header} is private to {target}/"


tree.finish([p for f in tree.files(".c", ".h") for p in check(f)], "layers")
