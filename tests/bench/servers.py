"""What the measurements run against: our gateway, jupyter_kernel_gateway, and bare kernels, each with its
own interpreter's kernelspecs, on loopback, ended by process id."""
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "clients"))
import launch  # noqa: E402  (the client tests' way of starting servers)

TOKEN = "bench-token"
WAIT_S = 180


class Bench:
    """Where things are, how much to measure, and what happened so far."""

    def __init__(self, bin_dir, work, quick, template):
        self.bin, self.work, self.quick, self.template = pathlib.Path(bin_dir), pathlib.Path(work), quick, template
        self.rows, self.commands = [], {}
        os.environ["CELLVISOR_BIN"] = str(self.bin / "cellvisor")
        self.echo_specs = self.work / "specs"
        subprocess.run([self.bin / "cv-echo-kernel", "--install", self.echo_specs, "echo"], check=True)

    def n(self, full, quick):
        return quick if self.quick else full

    def drive(self, *args, timeout=WAIT_S * 5):
        """One run of cv-bench; its answer."""
        argv = [str(self.bin / "cv-bench"), *map(str, args)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise RuntimeError(f"cv-bench {args[0]}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def say(self, text):
        print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    def row(self, line, what, unit, samples, **more):
        """One figure of the report. `samples`: a list, or a single number."""
        figures = samples if isinstance(samples, dict) else {"n": 1, "p50": samples}
        self.rows.append({"line": line, "what": what, "unit": unit, **figures, **more})

    @contextlib.contextmanager
    def gateway(self, name, *options, echo=False):
        env = {"JUPYTER_PATH": str(self.echo_specs)} if echo else {}
        options = ["--token", TOKEN, "--log-level", "warn", *options]
        self.commands[name] = "cellvisor serve " + " ".join(o for o in options if o != str(self.work / "state"))
        server = launch.gateway(self.work / f"{name}.log", *options, env=env)
        server.token = TOKEN
        try:
            yield server
        finally:
            server.stop(None)

    @contextlib.contextmanager
    def local(self, name, echo=False):
        with self.gateway(name, "--insecure-local", "--local-only", "--state", str(self.work / "state"),
                          "--pool-parked", "0", "--pool-deferred", "0", echo=echo) as server:
            yield server

    @contextlib.contextmanager
    def tcg(self, name, parked, deferred=0):
        with self.gateway(name, "--accel", "tcg", "--template-only", self.template, "--pool-parked", str(parked),
                          "--pool-deferred", str(deferred), "--pool-max", str(parked + deferred)) as server:
            yield server

    @contextlib.contextmanager
    def peer(self, name, echo=False):
        """jupyter_kernel_gateway; its output limiter is off, since it drops output."""
        port = launch.free_port()
        argv = [sys.executable, "-m", "kernel_gateway", f"--KernelGatewayApp.port={port}",
                "--KernelGatewayApp.ip=127.0.0.1", f"--KernelGatewayApp.auth_token={TOKEN}",
                "--ZMQChannelsWebsocketConnection.limit_rate=False"]
        self.commands[name] = "python -m kernel_gateway " + " ".join(argv[3:])
        env = {"JUPYTER_PATH": str(self.echo_specs)} if echo else {}
        server = launch.Server(argv, self.work / f"{name}.log", env)
        server.url, server.token = f"http://127.0.0.1:{port}/", TOKEN
        try:
            wait_for(lambda: answers(server), "jupyter_kernel_gateway")
            yield server
        finally:
            server.stop(None)

    @contextlib.contextmanager
    def kernel(self, name, argv, transport):
        """A bare kernel as jupyter_client would start it; yields its connection file."""
        file = self.work / f"{name}.json"
        base = launch.free_port()
        ipc = transport == "ipc"
        ports = {f"{c}_port": i + 1 if ipc else launch.free_port()
                 for i, c in enumerate(("shell", "iopub", "stdin", "control", "hb"))}
        file.write_text(json.dumps({**ports, "ip": str(self.work / f"{name}.ipc") if ipc else "127.0.0.1",
                                    "transport": transport, "key": f"key-{base}",
                                    "signature_scheme": "hmac-sha256", "kernel_name": name}))
        with open(self.work / f"{name}.log", "wb") as out:
            proc = subprocess.Popen([a.replace("{connection_file}", str(file)) for a in argv],
                                    stdout=out, stderr=out, env=launch.environment("bench"))
        try:
            yield file
        finally:
            proc.kill()
            proc.wait()


def wait_for(ready, what, seconds=WAIT_S):
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not so after {seconds} s")
        time.sleep(0.02)


def get(server, path, method="GET", body=None):
    request = urllib.request.Request(server.url + path, method=method, data=body,
                                     headers={"Authorization": f"token {server.token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def answers(server):
    try:
        return bool(get(server, "api"))
    except OSError:
        if server.proc.poll() is not None:
            server.fail("ended before it answered")
        return False


def vms(server):
    """{state: number} of the pool."""
    found = {}
    for state, value in re.findall(r'^cellvisor_pool_vms\{[^}]*state="(\w+)"[^}]*\} (\d+)',
                                   get(server, "metrics"), re.M):
        found[state] = found.get(state, 0) + int(value)
    return found


def settled(server, parked):
    """Wait until the pool is as full as asked, nothing starts or ends, and the processors are idle."""
    def ready():
        now = vms(server)
        return now.get("parked") == parked and not now.get("starting") and not now.get("running")
    wait_for(ready, f"{parked} parked sandboxes and nothing else")
    quiet()


def quiet(seconds=8):
    """Give what we stopped a moment to be gone; a machine that others use is measured as it is."""
    deadline = time.monotonic() + seconds
    while busy(0.1) > 0.2 and time.monotonic() < deadline:
        pass


def cpu_times():
    fields = [int(x) for x in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]


def busy(seconds=1.0):
    """Share of the machine's processors that is in use."""
    total, idle = cpu_times()
    time.sleep(seconds)
    total2, idle2 = cpu_times()
    return 1 - (idle2 - idle) / max(1, total2 - total)


def memory(pid):
    """MB by kind: VmRSS with its parts from status, Pss and private from smaps_rollup."""
    found = {}
    for file in ("status", "smaps_rollup"):
        text = pathlib.Path(f"/proc/{pid}/{file}").read_text()
        for key, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M):
            found.setdefault(key, int(kb) / 1024)
    return found


def pid_of_machine(server):
    """Process ids of VMMs below the gateway."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"qemu" in (entry / "cmdline").read_bytes()[:200]:
                text = (entry / "status").read_text()
                if int(re.search(r"^PPid:\s+(\d+)", text, re.M).group(1)) == server.proc.pid:
                    found.append(int(entry.name))
        except (OSError, AttributeError):
            pass
    return found
