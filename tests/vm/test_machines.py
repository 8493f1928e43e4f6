"""What makes a sandbox a sandbox: each clone is different, nothing of the host is in it, the process around it
has no rights, and its end is noticed."""
import json
import os
import pathlib
import signal
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import conftest
import launch
import pytest
import websocket

CLONES = 20


def vmm_pid(lone):
    """Process id of the QEMU of the only kernel of a gateway."""
    deadline = time.monotonic() + 30  # machines of earlier kernels end in the background
    while len(lone.machines()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    pid, = lone.machines()
    return pid


def status_of(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_kernel_runs_in_a_virtual_machine_of_its_own(gateway, kernel):
    assert gateway.model(kernel)["cellvisor"]["tier"] == "tcg"
    guest = json.loads(gateway.text(kernel, "import json, os, platform\n"
                                            "print(json.dumps([platform.release(), os.uname().nodename,"
                                            " open('/proc/1/comm').read().strip(), os.cpu_count()]))"))
    assert guest[0] != os.uname().release
    assert guest[1] != os.uname().nodename
    assert "shim" in guest[2] or "init" in guest[2]


def test_twenty_clones_differ_in_everything_that_must_differ(gateway):
    code = ("import json, os, random, secrets, socket, ssl, tempfile, time, uuid\n"
            "print(json.dumps({'urandom': os.urandom(16).hex(), 'random': random.random(),"
            " 'secrets': secrets.token_hex(), 'uuid4': str(uuid.uuid4()), 'uuid1': str(uuid.uuid1()),"
            " 'ssl': ssl.RAND_bytes(16).hex(), 'tempfile': next(tempfile._get_candidate_names()),"
            " 'hash': hash('x') if False else id, 'hostname': socket.gethostname(),"
            " 'machine_id': open('/etc/machine-id').read().strip(),"
            " 'boot_id': open('/proc/sys/kernel/random/boot_id').read().strip()}, default=lambda o: 0))\n"
            "print(time.time())")
    with ThreadPoolExecutor(2) as pool:
        kernels = list(pool.map(lambda _: gateway.start(), range(CLONES)))
    seen = []
    for kernel in kernels:
        before = time.time()
        values, clock = gateway.text(kernel, code).splitlines()
        assert before - 2 < float(clock) < time.time() + 2, "the guest's clock is off"
        seen.append(json.loads(values))
    for kernel in kernels:
        gateway.delete(kernel)
    for key in ("urandom", "random", "secrets", "uuid4", "uuid1", "ssl", "tempfile", "hostname", "machine_id",
                "boot_id"):
        assert len({s[key] for s in seen}) == CLONES, f"{key} repeats: {sorted(str(s[key]) for s in seen)}"


def test_state_persists_from_execution_to_execution_and_not_beyond(gateway):
    first, second = gateway.start(), gateway.start()
    gateway.text(first, "x = 41; open('/tmp/mark', 'w').write('here')")
    assert gateway.text(first, "print(x + 1, open('/tmp/mark').read())") == "42 here"
    assert gateway.text(second, "import os; print('x' in globals(), os.path.exists('/tmp/mark'))") == \
        "False False"
    gateway.delete(first)
    gateway.delete(second)


def test_there_is_no_network_card(gateway, kernel):
    assert gateway.text(kernel, "import os; print(sorted(os.listdir('/sys/class/net')))") in ("['lo']", "[]")
    reached = gateway.text(
        kernel, "import socket\nfor address in ('10.0.2.2', '169.254.169.254', '192.0.2.1'):\n"
                "    try:\n        socket.create_connection((address, 80), 2).close(); print('reached', address)\n"
                "    except OSError: pass")
    assert reached == ""


def test_nothing_of_the_host_is_visible(gateway, kernel, tmp_path):
    secret = tmp_path / uuid.uuid4().hex
    secret.write_text("host secret")
    seen = json.loads(gateway.text(
        kernel, f"import json, os\nprint(json.dumps([os.path.exists({str(secret)!r}),"
                " open('/proc/self/mounts').read(), dict(os.environ),"
                " open('/proc/cmdline').read(), os.listdir('/'), os.getuid()]))"))
    assert seen[0] is False
    assert seen[-1] != 0, "user code is root in its guest"
    assert conftest.SECRET not in json.dumps(seen)


def test_the_vmm_has_no_rights(lone):
    kernel = lone.start()
    pid = vmm_pid(lone)
    status = status_of(pid)
    if os.geteuid() == 0:
        assert "0" not in status["Uid"].split(), "the VMM runs as root"
        assert "0" not in status["Gid"].split(), "the VMM has root's group"
    assert int(status["CapEff"], 16) == 0 and int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2", "QEMU's seccomp filter is off"
    assert conftest.SECRET.encode() not in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    assert conftest.SECRET.encode() not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    lone.delete(kernel)


def test_a_stronger_isolation_can_be_demanded_and_is_refused_where_it_is_not(gateway):
    answer = gateway.call("POST", "api/kernels", {"cellvisor": {"tier": "kvm"}})
    assert 400 <= answer.status_code < 600 and answer.status_code != 201
    assert "kvm" in answer.json()["message"]


class Socket:
    """A kernel websocket in legacy framing."""

    def __init__(self, gateway, kernel):
        self.session = uuid.uuid4().hex
        self.ws = websocket.create_connection(
            gateway.url.replace("http", "ws") + f"api/kernels/{kernel['id']}/channels?session_id={self.session}",
            header=[f"Authorization: token {conftest.SECRET}"], timeout=60, http_no_proxy=["127.0.0.1"])

    def request(self, code):
        header = {"msg_id": uuid.uuid4().hex, "session": self.session, "username": "t", "version": "5.3",
                  "msg_type": "execute_request"}
        self.ws.send(json.dumps({"header": header, "parent_header": {}, "metadata": {}, "channel": "shell",
                                 "content": {"code": code, "silent": False}}))
        return header["msg_id"]

    def until(self, wanted, *kinds):
        """Messages of one request until all of kinds have come; (type, content) in order."""
        got = []
        while not set(kinds) <= {k for k, _ in got}:
            message = json.loads(self.ws.recv())
            if message["parent_header"].get("msg_id") == wanted:
                kind = message["header"]["msg_type"]
                if kind == "status":
                    kind = message["content"]["execution_state"]
                got.append((kind, message["content"]))
        return got


def test_a_killed_vmm_gives_an_error_and_idle_within_a_second(lone):
    kernel = lone.start()
    socket = Socket(lone, kernel)
    pid = vmm_pid(lone)
    wanted = socket.request("print('in', flush=True)\nwhile True: pass")
    socket.until(wanted, "stream")
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    got = socket.until(wanted, "error", "execute_reply", "idle")
    took = time.monotonic() - began
    assert dict(got)["execute_reply"]["status"] == "error"
    assert dict(got)["error"]["evalue"]
    assert took < 1, f"{took:.2f} s"
    socket.ws.close()
    lone.delete(kernel)
    deadline = time.monotonic() + 30
    while lone.machines() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lone.machines() == {}


def test_a_kernel_that_kills_itself_says_so_and_works_again(gateway, kernel):
    result = gateway.execute(kernel, "import os; os.kill(os.getpid(), 9)")
    assert result["status"] in ("error", "dead")
    assert "SIGKILL" in json.dumps(result["error"]) or "kill" in json.dumps(result["error"]).lower()
    deadline = time.monotonic() + 120
    while gateway.model(kernel)["execution_state"] != "idle":
        assert time.monotonic() < deadline, gateway.model(kernel)
        time.sleep(0.1)
    assert gateway.text(kernel, "print('back')") == "back"


def test_running_out_of_memory_is_reported_as_such(gateway):
    kernel = gateway.start()
    result = gateway.execute(kernel, "keep = []\nwhile True: keep.append(b'x' * (16 << 20))")
    assert result["status"] in ("error", "dead")
    assert "memory" in json.dumps(result["error"]).lower(), result["error"]
    gateway.delete(kernel)


def test_an_endless_loop_is_interrupted(gateway, kernel):
    socket = Socket(gateway, kernel)
    wanted = socket.request("print('in', flush=True)\nwhile True: pass")
    socket.until(wanted, "stream")
    assert gateway.call("POST", f"api/kernels/{kernel['id']}/interrupt").status_code == 204
    got = dict(socket.until(wanted, "execute_reply", "idle"))
    assert got["execute_reply"]["ename"] == "KeyboardInterrupt"
    assert gateway.text(kernel, "print('alive')") == "alive"
    socket.ws.close()


def test_output_of_many_megabytes_arrives_whole(gateway, kernel):
    socket = Socket(gateway, kernel)
    lines = 200_000
    wanted = socket.request(f"for i in range({lines}): print(i)")
    got = socket.until(wanted, "execute_reply", "idle")
    text = "".join(content["text"] for kind, content in got if kind == "stream")
    assert text == "".join(f"{i}\n" for i in range(lines))
    socket.ws.close()


def test_kernels_that_end_leave_no_process_descriptor_or_file(lone):
    def settled():
        """(machines, run folders, descriptors) once the ends of the kernels are through."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            left = len(lone.machines()), len(list((lone.state / "run").glob("*/*")))
            if left == (0, 0):
                break
            time.sleep(0.1)
        lone.session.close()  # its connections are descriptors of the gateway, too
        time.sleep(0.5)
        return *left, descriptors(lone.pid)

    def round_of_four():
        for kernel in [lone.start() for _ in range(4)]:
            lone.text(kernel, "print(1)")
            lone.delete(kernel)
        return settled()

    before = round_of_four()  # whatever is opened once is open now
    assert round_of_four() == before
    assert before[:2] == (0, 0)


def test_a_gateway_that_is_killed_takes_its_machines_with_it(tmp_path):
    running = conftest.Gateway(tmp_path, "--template-only", "minimal", "--pool-parked", "1")
    running.start()
    machines = running.machines()
    assert machines
    os.kill(running.pid, signal.SIGKILL)
    running.server.proc.wait()
    deadline = time.monotonic() + 10
    while launch.alive(machines) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launch.alive(machines) == {}


@pytest.mark.parametrize("damage", ["vmstate", "memory", "manifest.json"])
def test_a_damaged_template_is_refused_with_the_way_out(tmp_path, damage):
    state = tmp_path / "state"
    (state / "templates").mkdir(parents=True)
    source = (conftest.store() / "templates" / "minimal").resolve()
    build = state / "builds" / source.name
    build.mkdir(parents=True)
    for file in source.iterdir():
        if file.name == damage:
            data = bytearray(file.read_bytes()[:1 << 20])
            data[len(data) // 2] ^= 0xff
            (build / file.name).write_bytes(data[:-100])
        else:
            (build / file.name).symlink_to(file)
    (state / "templates" / "minimal").symlink_to(f"../builds/{source.name}")
    run = subprocess.run([launch.cellvisor(), "run", "--state", str(state), "--accel", "tcg", "--template",
                          "minimal", "-c", "1"], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 3, run
    assert "template build" in run.stderr and "minimal" in run.stderr, run.stderr
