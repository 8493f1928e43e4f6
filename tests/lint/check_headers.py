#!/usr/bin/env python3
"""Every header compiles by itself and starts with #pragma once."""
import concurrent.futures
import os
import subprocess

import tree

FLAGS = ["-std=gnu17", "-D_GNU_SOURCE", "-I.", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
         "-Wno-unused-function", "-x", "c", "-"]


def check(path):
    if not tree.text(path).startswith("#pragma once"):
        return f"{path}: does not start with #pragma once"
    # Included twice: a header that is not idempotent fails here.
    source = f'#include "{path}"\n#include "{path}"\n'
    if path.name == "banned.h":
        source = "#include <string.h>\n#include <stdio.h>\n#include <time.h>\n" + source
    run = subprocess.run([os.environ.get("CC", "gcc"), *FLAGS], input=source, cwd=tree.ROOT,
                         capture_output=True, text=True, check=False)
    return f"{path}: does not compile alone:\n{run.stderr}" if run.returncode else None


headers = tree.files(".h", under=tree.C_FOLDERS + ("tests/support",))
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    tree.finish([p for p in pool.map(check, headers) if p], "headers")
