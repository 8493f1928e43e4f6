"""Fixtures of the gateway's integration tests: the real program on local echo kernels. Every server is checked at
its end: clean exit, no process, no socket and no kernel directory left behind, no token in its log."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
import requests

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "clients"))
sys.path.insert(0, str(HERE))
import launch  # noqa: E402

ALICE, BOB = "alice-SECRET-0123456789", "bob-SECRET-9876543210"
ODD_SPEC = "Py [a b]é"
PNG = bytes.fromhex("89504e470d0a1a0a") + bytes(200)


def binary(name):
    return pathlib.Path(launch.cellvisor()).with_name(name)


@pytest.fixture(scope="session")
def specs(tmp_path_factory):
    """A JUPYTER_PATH with the echo kernel under two names, one of them odd (case-138), with resources."""
    path = tmp_path_factory.mktemp("jupyter")
    subprocess.run([binary("cv-echo-kernel"), "--install", path], check=True)
    kernels = path / "kernels"
    shutil.copytree(kernels / "echo", kernels / ODD_SPEC)
    for name in ("echo", ODD_SPEC):
        (kernels / name / "logo-64x64.png").write_bytes(PNG)
        (kernels / name / "logo-svg.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        (kernels / name / "kernel.js").write_text("export {}")
    slow = json.loads((kernels / "echo" / "kernel.json").read_text())
    slow["env"] = {"ECHO_START_DELAY_MS": "1500"}
    (kernels / "slow").mkdir()
    (kernels / "slow" / "kernel.json").write_text(json.dumps(slow))
    slow["env"] = {"ECHO_START_EXIT": "3"}
    (kernels / "broken").mkdir()
    (kernels / "broken" / "kernel.json").write_text(json.dumps(slow))
    return path


class Gateway:
    """A running server and a REST client of it."""

    def __init__(self, server, state):
        self.server, self.state = server, state
        self.url = server.url.rstrip("/")
        self.session = requests.Session()

    @property
    def pid(self):
        return self.server.proc.pid

    def log(self):
        return self.server.log.read_text(errors="replace")

    def call(self, method, path, token=ALICE, **kw):
        headers = dict(kw.pop("headers", None) or {})
        if token is not None:
            headers.setdefault("Authorization", f"token {token}")
        kw.setdefault("timeout", 30)
        kw.setdefault("verify", False)  # the environment may name a bundle
        kw.setdefault("allow_redirects", False)
        return self.session.request(method, self.url + path, headers=headers, **kw)

    def get(self, path, **kw):
        return self.call("GET", path, **kw)

    def post(self, path, body=None, **kw):
        return self.call("POST", path, json=body, **kw) if body is not None else self.call("POST", path, **kw)

    def kernel(self, **body):
        r = self.post("/api/kernels", {"name": "echo", **body})
        assert r.status_code == 201, r.text
        return r.json()["id"]

    def model(self, kernel):
        return self.get(f"/api/kernels/{kernel}").json()

    def run(self, kernel, code, **body):
        r = self.post(f"/api/kernels/{kernel}/execute", {"code": code, **body})
        assert r.status_code == 200, r.text
        return r.json()

    def drop_kernels(self):
        for token in (ALICE, BOB):
            for k in self.get("/api/kernels", token=token).json():
                self.call("DELETE", f"/api/kernels/{k['id']}", token=token)

    def fds(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def leftovers(state):
    """Sockets and run directories below the state directory."""
    return [p for p in state.rglob("*") if p.is_socket() or (p.parent.name == "run" and p.is_dir())]


@pytest.fixture(scope="session")
def start(specs, tmp_path_factory):
    """start(*options) -> Gateway; stop(gateway) checks what it leaves behind."""
    def run(*options, tokens=(f"alice:{ALICE}", f"bob:{BOB}"), env=None):
        directory = tmp_path_factory.mktemp("gw")
        state = pathlib.Path(tempfile.mkdtemp(prefix="cvgw"))  # short: unix sockets live below it
        extra = [x for t in tokens for x in ("--token", t)]
        server = launch.gateway(directory / "server.log", "--insecure-local", "--local-only", "--state", str(state),
                                "--log-level", "debug", *extra, *options,
                                env={"JUPYTER_PATH": str(specs), **(env or {})})
        return Gateway(server, state)
    return run


def stop(gw):
    gw.session.close()
    gw.server.stop(0)
    assert leftovers(gw.state) == []
    shutil.rmtree(gw.state)
    text = gw.log()
    for token in (ALICE, BOB):
        assert token not in text, "a token in the log"
    return text


@pytest.fixture(scope="module")
def gw(start):
    """One server for the tests of a module."""
    running = start()
    yield running
    stop(running)


@pytest.fixture
def fresh(start):
    """A server with options for one test: fresh("--base-url", "/x")."""
    made = []

    def run(*options, **kw):
        made.append(start(*options, **kw))
        return made[-1]
    yield run
    for g in made:
        if g.server.proc.poll() is None:
            stop(g)


@pytest.fixture(autouse=True)
def no_kernels_left(request):
    """Tests share servers, not kernels."""
    yield
    if "gw" in request.fixturenames:
        request.getfixturevalue("gw").drop_kernels()
