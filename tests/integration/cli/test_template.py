"""`cellvisor template` as a person meets it, and what bad snapshots do to the rest."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "clients"))
import launch  # noqa: E402

MARK = "template-test"
BUILT = pathlib.Path(os.environ.get("CELLVISOR_STATE",
                                    pathlib.Path.home() / ".local/share/cellvisor")) / "templates/minimal"


def cellvisor(*args, timeout=180):
    run = subprocess.run([launch.cellvisor(), *args], capture_output=True, text=True, timeout=timeout,
                         env=launch.environment(MARK), check=False)
    assert "AddressSanitizer" not in run.stderr and "runtime error:" not in run.stderr, run.stderr
    return run


def template(state, verb, *args):
    return cellvisor("template", verb, "--state", str(state), *args)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def recipe(tmp_path, text):
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "template.json").write_text(text)
    return str(folder)


# ---- mistakes ----

@pytest.mark.parametrize("args, code, text", [
    (["template"], 2, "build"),
    (["template", "biuld"], 2, 'did you mean "build"?'),
    (["template", "build"], 2, "name at least one template"),
    (["template", "build", "no-such"], 2, 'no recipe "no-such"'),
    (["template", "build", "./no/such"], 2, "no recipe at ./no/such"),
    (["template", "build", "--acel", "tcg", "x"], 2, "--accel"),
    (["template", "build", "--accel", "fast", "x"], 2, "fast"),
    (["template", "inspect"], 2, "name one template"),
    (["template", "rm"], 2, "name at least one"),
])
def test_a_mistake_is_named(args, code, text):
    run = cellvisor(*args)
    assert (run.returncode, run.stdout) == (code, "")
    assert text in run.stderr


@pytest.mark.parametrize("text, says", [
    ('{"apt": ["python3",]}', "line 1"),
    ('{"atp": []}', "apt"),
    ('{"apt": ["a b"]}', "apt[0]"),
    ('{"memory_mb": "lots"}', "memory_mb: not an integer"),
    ('{"pip": ["x"]}', 'pip: needs "python3-pip" in apt'),
])
def test_a_wrong_recipe_is_usage_and_starts_nothing(tmp_path, state, text, says):
    run = template(state, "build", recipe(tmp_path, text))
    assert run.returncode == 2
    assert "template.json: " in run.stderr and says in run.stderr
    assert not (state / "builds").exists()


def test_a_missing_qemu_is_said_before_anything_is_done(tmp_path, state):
    run = template(state, "build", "--accel", "tcg", "--qemu", "/nonexistent/qemu", recipe(tmp_path, "{}"))
    assert run.returncode == 3
    assert "qemu-system-x86" in run.stderr
    assert not list((state / "cache").iterdir())


def test_a_mirror_that_cannot_be_reached_is_not_our_failure(tmp_path, state):
    run = template(state, "build", "--accel", "tcg", "--mirror", "http://127.0.0.1:9/debian", recipe(tmp_path, "{}"))
    assert run.returncode == 3
    assert "the package mirror cannot be reached" in run.stderr and "log: " in run.stderr
    assert not [p for p in (state / "cache").iterdir() if not p.name.startswith(".tmp-")]


# ---- an empty store ----

def test_an_empty_store_says_what_to_do(state):
    run = template(state, "list")
    assert run.returncode == 0 and "template build" in run.stdout
    assert json.loads(template(state, "list", "--json").stdout) == []
    run = template(state, "inspect", "python")
    assert run.returncode == 3 and "cellvisor template build python" in run.stderr
    run = template(state, "rm", "python")
    assert run.returncode == 3 and 'no template "python"' in run.stderr


# ---- real snapshots that are not what they were ----

@pytest.fixture
def copies(state):
    """Three names for a real template, each with a folder of its own: good, and two to be spoilt."""
    if not (BUILT / "manifest.json").exists():
        pytest.skip("template minimal is not built")
    (state / "templates").mkdir(parents=True)
    for name in ("good", "first", "second"):
        shutil.copytree(BUILT, state / "builds" / name, copy_function=os.link)
        (state / "templates" / name).symlink_to(f"../builds/{name}")
    return state


def replace(path, data):
    """A new file, because the old one is shared with the real template."""
    path.unlink()
    path.write_bytes(data)


def edit_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    replace(folder / "manifest.json", json.dumps(manifest).encode())


def states(state):
    return {t["name"]: t["state"] for t in json.loads(template(state, "list", "--json").stdout)}


def run_in(state, name):
    return cellvisor("run", "--state", str(state), "--accel", "tcg", "--template", name, "-c", "print(6 * 7)")


def test_corrupt_and_foreign_snapshots_are_refused_and_leave_the_rest_working(copies):
    builds = copies / "builds"
    vmstate = bytearray((builds / "first/vmstate").read_bytes())
    vmstate[len(vmstate) // 2] ^= 1
    replace(builds / "first/vmstate", bytes(vmstate))

    def foreign(manifest):
        manifest["machine"].update(fingerprint="0" * 64, qemu_version="1.2.3")

    edit_manifest(builds / "second", foreign)
    assert states(copies) == {"good": "ready", "first": "broken", "second": "stale"}

    run = run_in(copies, "first")
    assert run.returncode == 3
    assert "vmstate" in run.stderr and "template build first --force" in run.stderr
    run = run_in(copies, "second")
    assert run.returncode == 3
    assert "made with QEMU 1.2.3" in run.stderr and "template build second" in run.stderr
    run = run_in(copies, "good")
    assert (run.returncode, run.stdout) == (0, "42\n"), run.stderr


def test_memory_that_rotted_on_the_disk_is_never_run(copies):
    path = copies / "builds/first/memory"
    data = path.read_bytes()
    at = next(i for i in range(0, len(data), 65536) if data[i:i + 65536].strip(b"\0"))
    path.unlink()
    with open(path, "wb") as f:
        f.truncate(len(data))
        f.write(data)
        f.seek(at + 100)
        f.write(bytes([data[at + 100] ^ 0xFF]))
    run = run_in(copies, "first")
    assert run.returncode == 3
    assert "corrupt" in run.stderr and "--force" in run.stderr


def test_rm_forgets_one_template_and_frees_its_files(copies):
    run = template(copies, "rm", "first")
    assert run.returncode == 0 and "removed template first" in run.stdout
    assert states(copies) == {"good": "ready", "second": "ready"}
    assert not (copies / "builds/first").exists()
    assert (copies / "builds/good/memory").exists()


def test_inspect_tells_what_is_in_it(copies):
    text = template(copies, "inspect", "good").stdout
    assert "python3 (running in the snapshot)" in text and "apt:        python3" in text
    manifest = json.loads(template(copies, "inspect", "--json", "good").stdout)
    assert manifest["packages"]["python3"].startswith("3.")
    assert manifest["machine"]["memory_mb"] == 512
