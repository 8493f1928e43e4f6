"""Fixtures of the shim's tests. Binaries: $CELLVISOR_SHIM and $CV_ECHO_KERNEL, else beside
$CELLVISOR_BIN, else of a build directory of this tree. Python kernels: the environment $CV_VENV,
else the one that runs pytest; without ipykernel there, those tests are skipped, loudly."""

import json
import os
import subprocess
import sys
import tempfile
import shutil
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from guestlink import Shim  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def binary(name, variable):
    candidates = [os.environ.get(variable)]
    if os.environ.get("CELLVISOR_BIN"):
        candidates.append(Path(os.environ["CELLVISOR_BIN"]).parent / name)
    candidates += [ROOT / "build" / preset / "bin" / name for preset in ("release", "asan")]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return str(candidate)
    pytest.exit(f"{name} is not built: set {variable} or CELLVISOR_BIN", returncode=3)


@pytest.fixture
def folder():
    """A short path: unix sockets live below it."""
    path = tempfile.mkdtemp(prefix="cvs", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


class Specs:
    """Kernelspecs of a test: folder/kernels/NAME/kernel.json."""

    def __init__(self, folder):
        self.folder = folder
        self.echo_program = binary("cv-echo-kernel", "CV_ECHO_KERNEL")
        subprocess.run([self.echo_program, "--install", str(folder)], check=True)

    def add(self, name, argv, **more):
        path = self.folder / "kernels" / name
        path.mkdir(parents=True)
        spec = {"argv": argv, "display_name": name, "language": "x", **more}
        (path / "kernel.json").write_text(json.dumps(spec))

    def add_echo(self, name, **more):
        self.add(name, [self.echo_program, "{connection_file}"], **more)


@pytest.fixture
def specs(folder):
    return Specs(folder)


def venv_bin():
    venv = os.environ.get("CV_VENV")
    return Path(venv) / "bin" if venv else Path(sys.executable).parent


@pytest.fixture
def make_shim(folder, specs):
    """make_shim(env={...}, hello=False): a shim in local mode; all end with the test."""
    made = []

    def make(env=None, **options):
        where = folder / str(len(made))
        where.mkdir()
        environ = {"PATH": f"{venv_bin()}:{os.environ['PATH']}", "CELLVISOR_GRACE_MS": "2000", **(env or {})}
        shim = Shim(binary("cellvisor-shim", "CELLVISOR_SHIM"), str(where), specs.folder, environ, **options)
        made.append(shim)
        return shim

    yield make
    problems = []
    for shim in made:
        if shim.process.poll() is None:
            code = shim.close()
            if code != 0:
                problems.append(f"exit code {code}")
        text = shim.log_text()
        if "AddressSanitizer" in text or "runtime error" in text or "BUG:" in text:
            problems.append(text[-4000:])
    assert not problems, "\n".join(problems)


@pytest.fixture
def shim(make_shim):
    s = make_shim()
    assert s.assign() == {"ok": True}
    return s


@pytest.fixture
def echo(shim):
    return shim.start("echo")


@pytest.fixture
def python(shim):
    if subprocess.run([venv_bin() / "python3", "-c", "import ipykernel"], capture_output=True).returncode:
        pytest.skip(f"NO IPYKERNEL in {venv_bin()}: set CV_VENV")
    return shim.start("python3")
