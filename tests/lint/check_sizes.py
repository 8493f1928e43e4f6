#!/usr/bin/env python3
"""Size gates: functions (lines, McCabe complexity, nesting) and files. Warnings do not fail."""
import re
import shutil
import subprocess
import sys

import tree

WARN_LINES, FAIL_LINES = 60, 100
WARN_COMPLEX, FAIL_COMPLEX = 12, 20
WARN_FILE, FAIL_FILE = 800, 1000
FAIL_DEPTH = 6  # braces: the function's own and five levels inside
CODE = (".c", ".h", ".py", ".mjs", ".js", ".sh")

if not shutil.which("pmccabe"):
    sys.exit("sizes: pmccabe is missing (apt install pmccabe)")
problems, warnings = [], []


def gate(value, warn, fail, text):
    if value > fail:
        problems.append(f"{text} (at most {fail})")
    elif value > warn:
        warnings.append(f"warning: {text} (wanted: {warn})")


def depth_of(path):
    """Deepest braces of each function, by a scan that skips strings, characters and comments."""
    source = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', " ",
                    tree.text(path), flags=re.S)
    depth, line = 0, 1
    for char in source:
        if char == "{":
            depth += 1
            if depth == FAIL_DEPTH + 1:
                problems.append(f"{path}: nesting deeper than {FAIL_DEPTH - 1} levels near line {line}")
        elif char == "}":
            depth -= 1
        elif char == "\n":
            line += 1


sources = tree.files(".c", ".h", under=tree.C_FOLDERS + ("tests",))
# main() of a test is a table: its length says nothing.
for row in subprocess.run(["pmccabe", *map(str, sources)], cwd=tree.ROOT, capture_output=True,
                          text=True, check=False).stdout.splitlines():
    complexity, _, _, _, lines, where = row.split("\t", 5)
    if where.startswith("tests/") and where.endswith(": main"):
        continue
    gate(int(lines), WARN_LINES, FAIL_LINES, f"{where}: {lines} lines")
    gate(int(complexity), WARN_COMPLEX, FAIL_COMPLEX, f"{where}: complexity {complexity}")
for path in tree.files(*CODE):
    lines = tree.text(path).count("\n")
    gate(lines, WARN_FILE, FAIL_FILE, f"{path}: {lines} lines")
for path in tree.files(".c", under=tree.C_FOLDERS):
    depth_of(path)
print("\n".join(warnings))
tree.finish(problems, "sizes")
