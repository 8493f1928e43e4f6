"""The VM suite: the real program, real microVMs (TCG), templates from the store."""
import os
import pathlib
import shutil
import sys

import pytest
import requests

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "clients"))
import launch  # noqa: E402

SECRET = "vm-suite-secret-0123456789"


def store():
    """State directory that holds the built templates."""
    home = os.environ.get("CELLVISOR_STATE") or os.path.expanduser("~/.local/share/cellvisor")
    if not (pathlib.Path(home) / "templates").is_dir():
        pytest.skip(f"no templates in {home}: run `cellvisor template build minimal python`")
    return pathlib.Path(home)


def own_state(directory):
    """A state directory of this test's own that shares the built templates: what is left in its run folder
    at the end is ours."""
    state = pathlib.Path(directory) / "state"
    state.mkdir()
    for name in ("templates", "builds"):
        (state / name).symlink_to(store() / name)
    shutil.copy(store() / "accel.json", state / "accel.json") if (store() / "accel.json").exists() else None
    return state


class Gateway:
    """A running gateway on microVMs with a small REST client."""

    def __init__(self, directory, *options):
        self.state = own_state(directory)
        self.server = launch.gateway(pathlib.Path(directory) / "server.log", "--accel", "tcg", "--state",
                                     str(self.state), *options, env={"CELLVISOR_TOKEN": SECRET})
        self.url = self.server.url
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers["Authorization"] = f"token {SECRET}"

    @property
    def pid(self):
        return self.server.proc.pid

    def machines(self):
        """{pid: (start time, command line)} of its VMMs."""
        return {p: v for p, v in launch.descendants(self.pid).items() if b"qemu" in v[1].split(b"\0")[0]}

    def call(self, method, path, body=None, timeout=180):
        return self.session.request(method, self.url + path, json=body, timeout=timeout)

    def start(self, **body):
        answer = self.call("POST", "api/kernels", body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def model(self, kernel):
        return self.call("GET", f"api/kernels/{kernel['id']}").json()

    def execute(self, kernel, code, **options):
        answer = self.call("POST", f"api/kernels/{kernel['id']}/execute", {"code": code, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, kernel, code):
        """Output of code that must succeed."""
        result = self.execute(kernel, code)
        assert result["status"] == "ok", result["error"]
        return "".join("".join(o["text"]) for o in result["outputs"] if o["output_type"] == "stream").strip()

    def delete(self, kernel):
        assert self.call("DELETE", f"api/kernels/{kernel['id']}").status_code == 204

    def stop(self):
        """Also: nothing of ours is left (processes are checked by the launcher)."""
        self.server.stop()
        left = list((self.state / "run").iterdir()) if (self.state / "run").exists() else []
        assert left == [], f"left in the run folder: {left}"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = Gateway(tmp_path_factory.mktemp("vm"), "--template-only", "minimal", "--pool-parked", "2")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    """A gateway without a pool: its only machines are those of kernels."""
    running = Gateway(tmp_path_factory.mktemp("lone"), "--template-only", "minimal", "--pool-parked", "0",
                      "--pool-deferred", "0")
    yield running
    running.stop()


@pytest.fixture
def kernel(gateway):
    started = gateway.start()
    yield started
    gateway.call("DELETE", f"api/kernels/{started['id']}")
