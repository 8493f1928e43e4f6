"""Fixtures of the field cases (docs/cases.md): one gateway on local kernels for the whole folder, real ipykernel and
the echo kernel. The server and its client come from the gateway's own tests. Python kernels: the environment
$CV_VENV, else the one that runs pytest, else the one that scripts/bench and scripts/test install."""
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE.parents[1]
sys.path.insert(0, str(HERE))


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gateway_tests = load("gateway_conftest", HERE.parent / "gateway" / "conftest.py")
import casekit  # noqa: E402

specs, start = gateway_tests.specs, gateway_tests.start
PACKAGES = "ipykernel, ipywidgets, matplotlib, pandas"


def find_venv():
    cache = pathlib.Path(os.environ.get("CELLVISOR_CACHE") or
                         pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cellvisor")
    stamp = hashlib.sha256((TESTS / "requirements.txt").read_bytes()).hexdigest()[:12]
    wanted = [os.environ.get("CV_VENV"), sys.prefix, cache / f"venv-{stamp}", cache / "venv"]
    for venv in map(pathlib.Path, filter(None, wanted)):
        if (venv / "bin/python").exists() and not subprocess.run(
                [venv / "bin/python", "-c", f"import {PACKAGES}"], capture_output=True).returncode:
            return venv
    pytest.exit(f"no Python environment with {PACKAGES}: set CV_VENV or run scripts/test --stage setup", returncode=3)


@pytest.fixture(scope="session")
def venv():
    return find_venv()


@pytest.fixture(scope="session")
def environ(venv, specs, tmp_path_factory):
    """Environment of a server that offers echo kernels and the environment's python3."""
    python = specs / "kernels" / "python3"
    if not python.exists():
        shutil.copytree(venv / "share/jupyter/kernels/python3", python)
        spec = json.loads((python / "kernel.json").read_text())
        spec["argv"][0] = str(venv / "bin/python")
        (python / "kernel.json").write_text(json.dumps(spec))
    home = tmp_path_factory.mktemp("home")
    return {"PATH": f"{venv}/bin:{os.environ['PATH']}", "HOME": str(home), "IPYTHONDIR": str(home / "ipython"),
            "MPLCONFIGDIR": str(home / "mpl"), "MPLBACKEND": ""}


@pytest.fixture(scope="session")
def shared_gateway(start, environ):
    running = start(env=environ)
    yield running
    gateway_tests.stop(running)


@pytest.fixture
def gw(shared_gateway):
    """The folder's server; kernels end with the test."""
    yield shared_gateway
    shared_gateway.drop_kernels()


@pytest.fixture
def fresh(start, environ):
    """A server with options for one test: fresh("--base-url", "/x")."""
    made = []

    def run(*options, env=None, **kw):
        made.append(start(*options, env={**environ, **(env or {})}, **kw))
        return made[-1]
    yield run
    for g in made:
        if g.server.proc.poll() is None:
            gateway_tests.stop(g)


@pytest.fixture
def py(gw):
    """Id of a Python kernel of its own."""
    return gw.kernel(name="python3")


@pytest.fixture
def ws(gw, py):
    """A client of that kernel."""
    with casekit.Client(gw, py, session="main") as client:
        yield client


@pytest.fixture
def echo(gw):
    return gw.kernel(name="echo")
