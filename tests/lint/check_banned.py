#!/usr/bin/env python3
"""Functions that the project does not use (common/banned.h), and a few habits grep can see."""
import re

import tree

BANNED = {
    r"\b(strcpy|strcat|sprintf|vsprintf|strtok|gets|localtime|gmtime|asctime|ctime|tmpnam|mktemp|alloca)\s*\(":
        "banned function",
    r"\b(atoi|atol|atoll|atof)\s*\(": "cannot report errors: use strtoul or a json_ getter",
    r"\b(system|popen)\s*\(": "runs a shell: use proc_spawn or proc_run",
    r"\b(rand|srand|random|srandom)\s*\(": "not random: use id_random",
    r"\btypedef\s+struct\b": "no typedef for structs",
    r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))": "needs an issue number: TODO(#12)",
}
ALLOWED_FILES = {"common/banned.h"}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


problems = []
for path in tree.files(".c", ".h", under=tree.C_FOLDERS + ("tests",)):
    if path.as_posix() in ALLOWED_FILES:
        continue
    whole = tree.text(path)
    code = STRING.sub(blank, COMMENT.sub(blank, whole))
    for pattern, why in BANNED.items():
        for hit in re.finditer(pattern, whole if "TODO" in pattern else code):
            line = whole.count("\n", 0, hit.start()) + 1
            problems.append(f"{path}:{line}: {hit.group().strip()}: {why}")
tree.finish(problems, "banned")
