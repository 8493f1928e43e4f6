#!/usr/bin/env python3
"""Documents that can drift: state machines of docs/ARCHITECTURE.md against the tables in the code, links
between documents, and tests named in docs/THREAT-MODEL.md."""
import re

import tree

MACHINES = ["kernelmgr/kernel.c", "vm/guest.c", "vm/qemu.c", "gateway/http/conn.c", "guest-kernel-shim/kernel.c"]
ENTRY = re.compile(r'\[(\w+)\]\s*=\s*\{\s*"([^"]+)",(.*?)\},', re.S)


def machine(path):
    """Lines "state -> next, next" of the table in a file, as sm_describe prints them."""
    source = tree.text(path)
    for name, value in re.findall(r"^#define (\w+) (SM_TO\(.*)$", source, re.M):
        source = re.sub(rf"\b{name}\b(?!.*SM_TO\()", value, source)
    table = re.search(r"struct sm_state states\[.*?\] = \{(.*?)\n\};", source, re.S).group(1)
    entries = ENTRY.findall(table)
    names = {enum: name for enum, name, _ in entries}
    lines = []
    for _, name, body in entries:
        following = [names[e] for e in re.findall(r"SM_TO\((\w+)\)", body)]
        lines.append(name + (" -> " + ", ".join(following) if following else ""))
    return lines


def check_machines():
    text = tree.text("docs/ARCHITECTURE.md")
    blocks = {tuple(sorted(normal(line) for line in b.strip().splitlines()))
              for b in re.findall(r"```\n(.*?)```", text, re.S)}
    for path in MACHINES:
        lines = machine(path)
        if tuple(sorted(normal(line) for line in lines)) not in blocks:
            yield f"docs/ARCHITECTURE.md: the states of {path} are\n  " + "\n  ".join(lines)


def normal(line):
    """Order of the successors does not matter."""
    state, _, following = line.partition(" -> ")
    return state.strip(), tuple(sorted(following.split(", ")))


def check_links():
    for path in tree.files(".md"):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", tree.text(path)):
            if not (tree.ROOT / path.parent / target).exists():
                yield f"{path}: link to {target}, which is not there"


def check_claims():
    known = set()
    for path in tree.files(".c", ".py", ".cjs", under=("tests",)):
        source = tree.text(path)
        known |= set(re.findall(r"\b(?:static void|def) (\w+)\(", source))
        known |= {path.name, path.stem}
    for name in re.findall(r"^\|.*\| `?([^|`]+)`?.*\|$", tree.text("docs/THREAT-MODEL.md"), re.M):
        for test in re.findall(r"\b(?:test_\w+|\w+_test)\b", name):
            if test not in known:
                yield f"docs/THREAT-MODEL.md: names the test {test}, which is not there"


tree.finish([*check_machines(), *check_links(), *check_claims()], "documents")
