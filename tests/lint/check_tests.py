#!/usr/bin/env python3
"""cmocka discovers nothing by itself: every *_test.c must be in its folder's CMakeLists.txt, every test
function in a group table, and every test must assert something (itself or through a helper)."""
import re

import tree

FUNCTION = re.compile(r"^(?:static\s+)?[\w\s*]*?\b(\w+)\(([^;{}]*)\)\s*\n\{\n(.*?)^\}", re.M | re.S)
ASSERTS = re.compile(r"\b(assert_\w+|fail|fail_msg|skip|assert)\s*\(")


def check(path):
    source = tree.text(path)
    cmake = tree.text(path.parent / "CMakeLists.txt")
    name = path.name[: -len("_test.c")]
    if not re.search(rf"\b{re.escape(name)}\b", cmake):
        yield f"{path}: not registered in {path.parent}/CMakeLists.txt"
    bodies = {m[0]: (m[1], m[2]) for m in FUNCTION.findall(source)}
    # Macros count as helpers: #define NAME(...) assert_...
    asserting = {m for m in re.findall(r"#define\s+(\w+)\(.*(?:\\\n.*)*", source)}
    asserting |= {n for n, (_, body) in bodies.items() if ASSERTS.search(body)}
    grown = True
    while grown:
        more = {n for n, (_, body) in bodies.items() if n not in asserting and
                any(re.search(rf"\b{a}\s*\(", body) for a in asserting)}
        grown = bool(more)
        asserting |= more
    for test, (args, _) in bodies.items():
        if not re.fullmatch(r"\s*void \*\*\w+\s*", args) or test in ("setup", "teardown"):
            continue
        if re.search(rf"static int {test}\(", source):
            continue
        if not re.search(rf"cmocka_unit_test\w*\(\s*{test}\b|\{{[^}}]*\b{test}\b", source):
            yield f"{path}: {test} is in no group table"
        if test not in asserting and "support/" not in source:
            yield f"{path}: {test} asserts nothing"


tests = [p for p in tree.files(".c", under=("tests/unit", "tests/sim")) if p.name.endswith("_test.c")]
tree.finish([p for t in tests for p in check(t)], "tests registered")
