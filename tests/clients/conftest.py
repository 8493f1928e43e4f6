"""Fixtures of the client tests: one gateway for each test module, checked for leftovers at its end."""
import os
import pathlib
import shutil
import subprocess

import launch
import pytest


def pytest_addoption(parser):
    parser.addoption("--backend", default="local", choices=["local", "vm", "peer-kg", "peer-js"],
                     help="what the clients talk to")


def start(request, directory, *options):
    kind = request.config.getoption("--backend")
    log = directory / "server.log"
    if kind == "local":
        return launch.gateway(log, "--insecure-local", "--local-only", "--state", str(directory / "state"),
                              *options)
    if kind == "vm":
        # Templates come from the state directory of the caller; the token is this test's own.
        return launch.gateway(log, "--accel", "tcg", *options)
    return launch.peer(kind, log, directory)


@pytest.fixture(scope="module")
def backend(request):
    return request.config.getoption("--backend")


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    running = start(request, tmp_path_factory.mktemp("server"))
    yield running
    running.stop(None if request.config.getoption("--backend").startswith("peer") else 0)


@pytest.fixture(scope="module")
def open_server(request, tmp_path_factory):
    """Without authentication: for clients that cannot send a token on their websocket."""
    kind = request.config.getoption("--backend")
    directory = tmp_path_factory.mktemp("open")
    if kind.startswith("peer"):
        running = launch.peer(kind, directory / "server.log", directory, token="")
    else:
        running = start(request, directory, "--no-auth")
    yield running
    running.stop(None if kind.startswith("peer") else 0)


@pytest.fixture(scope="session")
def node():
    """Runs a script under Node with the test packages in reach; returns (code, output)."""
    modules = os.environ.get("CELLVISOR_NODE_MODULES", str(launch.ROOT / "tests/node_modules"))
    if not shutil.which("node") or not pathlib.Path(modules).is_dir():
        pytest.skip("node or its packages are missing: run scripts/test --stage setup")

    def run(script, *args, timeout=300, env=None):
        # In a group of its own: a browser that hangs is ended with it.
        with subprocess.Popen(["node", str(pathlib.Path(__file__).parent / script), *args],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              start_new_session=True,
                              env={**os.environ, "NODE_PATH": modules, **(env or {})}) as proc:
            try:
                output, _ = proc.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(proc.pid, 9)
                output, _ = proc.communicate()
                output += f"\nended after {timeout} s"
            return proc.returncode, output

    return run
