"""The program as a person meets it: exit codes, texts of mistakes, files it writes, how it stops."""
import json
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "clients"))
import launch  # noqa: E402

MARK = "cli-test"


def cellvisor(*args, stdin=None, env=None, timeout=120):
    run = subprocess.run([launch.cellvisor(), *args], input=stdin, capture_output=True, text=True,
                         timeout=timeout, env={**launch.environment(MARK), **(env or {})}, check=False)
    assert "AddressSanitizer" not in run.stderr and "runtime error:" not in run.stderr, run.stderr
    return run


@pytest.fixture
def state(tmp_path):
    return str(tmp_path / "state")


def local(state, *args, **kw):
    return cellvisor("run", "--insecure-local", "--state", state, *args, **kw)


# ---- texts ----

@pytest.mark.parametrize("command", ["serve", "run", "doctor", "template build"])
def test_help_of_every_command_names_options_and_exit_codes(command):
    run = cellvisor(*command.split(), "--help")
    assert run.returncode == 0
    assert f"Usage: cellvisor {command}" in run.stdout
    assert "--state" in run.stdout and "xit code" in run.stdout


def test_the_program_says_what_it_can_do():
    assert cellvisor().returncode == 2
    run = cellvisor("--help")
    assert run.returncode == 0 and "serve" in run.stdout and "doctor" in run.stdout
    assert cellvisor("--version").stdout.startswith("cellvisor ")


@pytest.mark.parametrize("args, text", [
    (["rum"], 'did you mean "run"?'),
    (["serve", "--prot", "1"], "did you mean --port?"),
    (["serve", "--port", "99999"], "--port"),
    (["serve", "--no-auth", "--ip", "0.0.0.0"], "loopback"),
    (["serve", "--local-only"], "--insecure-local"),
    (["serve", "--config", "/nonexistent.json"], "/nonexistent.json"),
    (["run"], "nothing to run"),
    (["run", "-c", "1", "file.py"], "not both"),
    (["run", "/nonexistent.py"], "/nonexistent.py"),
    (["run", "book.ipynb"], "notebook"),
    (["run", "--insecure-local", "--template", "x", "-c", "1"], "exclude each other"),
    (["doctor", "--jsn"], "did you mean --json?"),
])
def test_wrong_usage_ends_with_2_and_a_hint(args, text):
    run = cellvisor(*args)
    assert run.returncode == 2, run.stderr
    assert text in run.stderr
    assert run.stdout == ""


def test_an_unknown_configuration_key_is_named_with_the_nearest(tmp_path):
    config = tmp_path / "gw.json"
    config.write_text('{"max_kernel": 3}')
    run = cellvisor("serve", "--config", str(config))
    assert run.returncode == 2
    assert '"max_kernel"' in run.stderr and '"max_kernels"' in run.stderr


# ---- run ----

def test_run_prints_text_and_ends_with_0(state):
    run = local(state, "-c", "print('hello'); 6 * 7")
    assert (run.returncode, run.stdout) == (0, "hello\n42\n"), run.stderr


def test_help_texts_of_the_kernel_are_printed(state):
    run = local(state, "-c", "len?")
    assert run.returncode == 0
    assert "number of items" in run.stdout
    assert "\x1b" not in run.stdout


def test_run_takes_a_file_or_standard_input(state, tmp_path):
    script = tmp_path / "a.py"
    script.write_text("print('from file')\n")
    assert local(state, str(script)).stdout == "from file\n"
    assert local(state, "-", stdin="print('from stdin')").stdout == "from stdin\n"


def test_run_keeps_stdout_and_stderr_apart(state):
    run = local(state, "-c", "import sys; print('out'); print('err', file=sys.stderr)")
    assert run.stdout == "out\n" and "err\n" in run.stderr


def test_code_that_raises_ends_with_1_and_its_traceback(state):
    run = local(state, "-c", "print('before'); 1 / 0")
    assert run.returncode == 1
    assert run.stdout == "before\n"
    assert "ZeroDivisionError: division by zero" in run.stderr
    assert "\x1b" not in run.stderr, "escape codes although stderr is no terminal"


def test_code_over_its_time_ends_with_124(state):
    run = local(state, "--timeout", "1", "-c", "while True: pass")
    assert run.returncode == 124
    assert "--timeout" in run.stderr


def test_a_kernel_that_dies_ends_with_1(state):
    run = local(state, "-c", "import os; os._exit(7)")
    assert run.returncode == 1
    assert "died" in run.stderr or "dead" in run.stderr.lower(), run.stderr


def test_images_are_saved(state, tmp_path):
    charts = tmp_path / "deep" / "charts"
    code = ("%matplotlib inline\nimport matplotlib.pyplot as plt\nfor n in (1, 2):\n"
            "    plt.plot([0, n])\n    plt.show()\n"
            "from IPython.display import SVG, display\n"
            "display(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))")
    run = local(state, "--save-images", str(charts), "-c", code)
    assert run.returncode == 0, run.stderr
    names = sorted(p.name for p in charts.iterdir())
    assert names == ["image-001.png", "image-002.png", "image-003.svg"]
    assert (charts / "image-001.png").read_bytes().startswith(b"\x89PNG")
    assert (charts / "image-003.svg").read_text().startswith("<svg")
    assert str(charts / "image-001.png") in run.stdout


def test_images_that_cannot_be_saved_end_with_3(state):
    code = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([0, 1])\nplt.show()"
    run = local(state, "--save-images", "/proc/nope", "-c", code)
    assert run.returncode == 3
    assert "/proc/nope" in run.stderr


def test_json_holds_sandbox_and_result(state):
    run = local(state, "--json", "-c", "print('x'); 1 + 1")
    result = json.loads(run.stdout)
    assert result["sandbox"]["tier"] == "local"
    assert result["execution"]["status"] == "ok"
    assert [o["output_type"] for o in result["execution"]["outputs"]] == ["stream", "execute_result"]


def test_an_unknown_kernelspec_is_named_with_what_there_is(state):
    run = local(state, "--spec", "nope", "-c", "1")
    assert run.returncode == 3
    assert '"nope"' in run.stderr and "python3" in run.stderr


def test_a_template_that_is_not_built_is_an_error_with_the_way_out(state):
    run = cellvisor("run", "--state", state, "-c", "1")
    assert run.returncode == 3
    assert "template build" in run.stderr


def test_interrupting_run_interrupts_the_code_and_leaves_nothing(state):
    with subprocess.Popen([launch.cellvisor(), "run", "--insecure-local", "--state", state, "-c",
                           "print('in', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=launch.environment("cli-int")) as proc:
        assert proc.stdout.readline() == "in\n"
        proc.send_signal(signal.SIGINT)
        _, err = proc.communicate(timeout=30)
    assert proc.returncode == 130
    assert "KeyboardInterrupt" in err
    assert launch.marked("cli-int") == []
    assert os.listdir(pathlib.Path(state) / "run") == []


# ---- doctor ----

def test_doctor_lists_its_checks(state):
    run = cellvisor("doctor", "--state", state, "--json")
    report = json.loads(run.stdout)
    checks = {c["check"]: c for c in report["checks"]}
    assert {"version", "qemu", "acceleration", "jail", "memory", "disk", "shim", "templates"} <= set(checks)
    assert checks["templates"]["verdict"] == "missing"
    assert report["ready"] is False and run.returncode == 1
    text = cellvisor("doctor", "--state", state)
    assert "template build" in text.stdout


def test_doctor_and_run_say_when_qemu_is_missing(state):
    run = cellvisor("doctor", "--state", state, "--qemu", "/nonexistent/qemu", "--json")
    checks = {c["check"]: c for c in json.loads(run.stdout)["checks"]}
    assert checks["qemu"]["verdict"] == "missing"
    assert "qemu-system-x86" in checks["qemu"]["text"]
    run = cellvisor("serve", "--state", state, "--port", "0", "--qemu", "/nonexistent/qemu")
    assert run.returncode == 3
    assert "qemu" in run.stderr.lower()


# ---- serve ----

def test_a_taken_port_is_an_error_that_names_it(state):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        run = cellvisor("serve", "--insecure-local", "--local-only", "--state", state, "--port", str(port))
        assert run.returncode == 3
        assert str(port) in run.stderr and "127.0.0.1" in run.stderr
    assert launch.marked(MARK) == []


def test_serve_prints_url_token_and_the_jupyterlab_line(state, tmp_path):
    server = launch.gateway(tmp_path / "log", "--insecure-local", "--local-only", "--state", state)
    token_file = pathlib.Path(state) / "token"
    try:
        text = server.log.read_text()
        assert server.url in text
        assert server.token == token_file.read_text().strip()
        assert f"jupyter lab --gateway-url={server.url}" in text
        assert server.token in text
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    finally:
        server.stop()
    assert os.listdir(pathlib.Path(state) / "run") == []


def test_the_token_survives_a_restart_and_is_private(state, tmp_path):
    tokens = []
    for _ in range(2):
        server = launch.gateway(tmp_path / "log", "--insecure-local", "--local-only", "--state", state)
        tokens.append(server.token)
        server.stop()
    assert tokens[0] == tokens[1]
    (pathlib.Path(state) / "token").chmod(0o644)
    run = cellvisor("serve", "--insecure-local", "--local-only", "--state", state, "--port", "0")
    assert run.returncode == 3 and "chmod 600" in run.stderr


def test_a_given_token_is_not_shown_by_ps(state, tmp_path):
    server = launch.gateway(tmp_path / "log", "--insecure-local", "--local-only", "--state", state,
                            "--token", "alice:topsecret-1234")
    try:
        cmdline = pathlib.Path(f"/proc/{server.proc.pid}/cmdline").read_bytes()
        assert b"topsecret" not in cmdline
        assert server.token == "topsecret-1234"
        assert "topsecret" not in server.log.read_text()
    finally:
        server.stop()


def test_a_stop_ends_within_a_moment_even_with_a_busy_kernel(state, tmp_path):
    import requests
    server = launch.gateway(tmp_path / "log", "--insecure-local", "--local-only", "--state", state)
    auth = {"Authorization": f"token {server.token}"}
    kernel = requests.post(f"{server.url}api/kernels", headers=auth, timeout=30).json()["id"]
    with pytest.raises(requests.Timeout):
        requests.post(f"{server.url}api/kernels/{kernel}/execute", headers=auth, timeout=2,
                      json={"code": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                                    "while True: pass"})
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 15
