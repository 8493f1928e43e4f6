#!/usr/bin/env python3
"""The tree speaks of the project alone: no paths of somebody's machine, no addresses of package hosts,
no white space at line ends, no huge files, scripts that can be executed."""
import os
import re

import tree

# Written so that this file does not match itself.
FORBIDDEN = {
    r"/root/" + r"\.pyenv": "path of a machine",
    r"/home/(?!user\b)[a-z]\w*/": "path of a machine",
    r"/work/" + r"(main|shared)\b": "path of a machine",
    r"/tmp/" + r"cv/": "path of a machine",
    r"registry\." + r"npmjs|files\.python" + r"hosted|\bpypi\." + r"org|deb\." + r"debian\.org":
        "address of a package host",
}
BINARY = (".png", ".bin", ".ico", ".woff2")
MAX_BYTES = 1_500_000

problems = []
for path in tree.files():
    full = tree.ROOT / path
    name = path.as_posix()
    if full.stat().st_size > MAX_BYTES:
        problems.append(f"{name}: {full.stat().st_size} bytes, more than {MAX_BYTES}")
    if path.suffix in BINARY or name.startswith(("tests/fuzz/corpus/", "tests/fuzz/crash/")):
        continue
    text = tree.text(path)
    for pattern, why in FORBIDDEN.items():
        for hit in re.finditer(pattern, text):
            line = text.count("\n", 0, hit.start()) + 1
            problems.append(f"{name}:{line}: \"{hit.group()}\": {why}")
    if name != "LICENSE" and path.suffix != ".json":
        for number, line in enumerate(text.split("\n"), 1):
            if line != line.rstrip() and path.suffix != ".md":
                problems.append(f"{name}:{number}: white space at the end of the line")
    if text.startswith("#!") and not os.access(full, os.X_OK):
        problems.append(f"{name}: starts with #! but cannot be executed")
tree.finish(problems, "tree")
