"""What the lint checks share: the files of the project and how a check ends."""
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
C_FOLDERS = ("common", "proto", "vm", "kernelmgr", "gateway", "guest-kernel-shim", "cli")


def files(*suffixes, under=()):
    """Paths below the root that git knows or would add, relative, sorted."""
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for name in sorted(set(out)):
        path = pathlib.PurePosixPath(name)
        if suffixes and path.suffix not in suffixes:
            continue
        if under and not any(name == u or name.startswith(u + "/") for u in under):
            continue
        if (ROOT / name).is_file():
            found.append(path)
    return found


def text(path):
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def finish(problems, what):
    for problem in problems:
        print(problem)
    if problems:
        print(f"{what}: {len(problems)} problem(s)")
        sys.exit(1)
    print(f"{what}: fine")
