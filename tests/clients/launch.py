"""Starts what the client tests talk to: our gateway on local kernels or on microVMs, or, to check the tests
themselves, another Jupyter server (--backend peer-kg, peer-js). Ports are always chosen by the server."""
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARK = "CELLVISOR_TEST_MARK"
START_S, STOP_S = 60, 30


def cellvisor():
    return os.environ.get("CELLVISOR_BIN", str(ROOT / "build/release/bin/cellvisor"))


def environment(mark):
    """This process's environment, with the interpreter's own kernelspecs and programs first."""
    prefix = pathlib.Path(sys.prefix)
    env = dict(os.environ)
    env[MARK] = mark
    env["PATH"] = f"{prefix}/bin:{env['PATH']}"
    env["JUPYTER_PATH"] = f"{prefix}/share/jupyter"
    env["PYTHONUNBUFFERED"] = "1"
    return env


def marked(mark):
    """Process ids that carry the mark in their environment."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ")))
        except OSError:
            pass
    return found


def process_table():
    """{pid: (parent, start time, command line)}; the start time tells a process from a later one of its number."""
    table = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                table[int(entry.name)] = (int(stat[1]), stat[19], (entry / "cmdline").read_bytes())
        except OSError:
            pass
    return table


def descendants(pid):
    """{pid: (start time, command line)} of everything below a process: machines carry no mark."""
    table, found, grown = process_table(), {}, True
    while grown:
        more = {p: (t[1], t[2]) for p, t in table.items() if p not in found and (t[0] == pid or t[0] in found)}
        grown = bool(more)
        found.update(more)
    return found


def alive(processes):
    """Those of `descendants` that are still there."""
    table = process_table()
    return {p: cmd for p, (start, cmd) in processes.items() if p in table and table[p][1] == start}


class Server:
    """A running server: url (with a slash at the end) and token ('' = none)."""

    def __init__(self, argv, log, env=None, pass_fds=()):
        self.mark = uuid.uuid4().hex
        self.log = pathlib.Path(log)
        self.url = self.token = ""
        env = {**environment(self.mark), **(env or {})}
        with open(self.log, "wb") as out:
            self.proc = subprocess.Popen(argv, stdout=out, stderr=out, env=env, pass_fds=pass_fds)

    def fail(self, text):
        self.proc.kill()
        self.proc.wait()
        raise AssertionError(f"{text}\n--- {self.log}\n{self.log.read_text(errors='replace')[-6000:]}")

    def stop(self, expect_code=0):
        """Graceful stop; whatever it started must be gone with it."""
        below = descendants(self.proc.pid)
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
        try:
            code = self.proc.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.fail(f"did not stop within {STOP_S} s of SIGTERM")
        deadline = time.monotonic() + 5
        while (left := alive(below) | dict(marked(self.mark))) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if expect_code is not None and code != expect_code:
            self.fail(f"exit code {code}")
        if left and expect_code is not None:
            self.fail(f"left behind: {left}")
        report = self.log.read_text(errors="replace")
        if "AddressSanitizer" in report or "runtime error:" in report:
            self.fail("sanitizer report")


def read_line(fd, server, seconds):
    """One line from a pipe, or a failed test when the server ends or stays silent."""
    data = b""
    deadline = time.monotonic() + seconds
    while not data.endswith(b"\n"):
        if not select.select([fd], [], [], 0.2)[0]:
            if server.proc.poll() is not None:
                server.fail(f"ended with {server.proc.returncode} before it was ready")
            if time.monotonic() > deadline:
                server.fail(f"not ready within {seconds} s")
            continue
        chunk = os.read(fd, 4096)
        if not chunk:
            server.fail("closed --ready-fd before it was ready")
        data += chunk
    return data.decode().split()


def gateway(log, *options, env=None):
    """Our gateway on a free port."""
    read_end, write_end = os.pipe()
    argv = [cellvisor(), "serve", "--port", "0", "--ready-fd", str(write_end), *options]
    try:
        server = Server(argv, log, env, pass_fds=(write_end,))
    finally:
        os.close(write_end)
    try:
        server.url, token = read_line(read_end, server, START_S)
    finally:
        os.close(read_end)
    server.token = "" if token == "-" else token
    return server


def free_port():
    """For peers that cannot be asked for theirs; another program may be faster, rarely."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def peer(kind, log, directory, token="peer-token"):
    """A Jupyter server of others."""
    port = free_port()
    if kind == "peer-kg":
        argv = [sys.executable, "-m", "kernel_gateway", f"--KernelGatewayApp.port={port}",
                "--KernelGatewayApp.ip=127.0.0.1", f"--KernelGatewayApp.auth_token={token}",
                "--JupyterWebsocketPersonality.list_kernels=True"]
    else:
        argv = [sys.executable, "-m", "jupyter_server", "--allow-root", f"--ServerApp.port={port}",
                "--no-browser", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={directory}",
                "--ServerApp.disable_check_xsrf=True"]
    server = Server(argv, log)
    server.url, server.token = f"http://127.0.0.1:{port}/", token
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.proc.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return server
        except OSError:
            time.sleep(0.1)
    server.fail("peer did not come up")
    return None


def jupyterlab(log, directory, gateway_server):
    """`jupyter lab --gateway-url`, as a user would start it."""
    runtime = pathlib.Path(directory) / "runtime"
    root = pathlib.Path(directory) / "notebooks"
    root.mkdir(parents=True, exist_ok=True)
    # No question about news over the notebook.
    quiet = pathlib.Path(directory) / "settings/@jupyterlab/apputils-extension"
    quiet.mkdir(parents=True, exist_ok=True)
    (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    argv = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ServerApp.port=0",
            f"--gateway-url={gateway_server.url}", f"--GatewayClient.auth_token={gateway_server.token}",
            "--IdentityProvider.token=lab-token", f"--ServerApp.root_dir={root}",]
    env = {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(pathlib.Path(directory) / "config"),
           "JUPYTERLAB_SETTINGS_DIR": str(pathlib.Path(directory) / "settings"),
           "JUPYTERLAB_WORKSPACES_DIR": str(pathlib.Path(directory) / "workspaces")}
    server = Server(argv, log, env)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for info in runtime.glob("jpserver-*.json"):
            try:
                data = json.loads(info.read_text())
            except ValueError:
                continue
            server.url, server.token = f"http://127.0.0.1:{data['port']}/", "lab-token"
            return server
        if server.proc.poll() is not None:
            server.fail("jupyter lab ended")
        time.sleep(0.1)
    server.fail("jupyter lab not ready")
    return None
