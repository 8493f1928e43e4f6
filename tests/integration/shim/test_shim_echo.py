"""The shim over a real link with the echo kernel: start, traffic, operations, ends."""

import os
import signal
import socket
import time

import pytest
from guestlink import DONE, MSG, OUT, PING, PONG, PREPARE, PREPARED, RESUME, RESUMED, SHUTDOWN, STATE, entropy


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pid, seconds=10):
    end = time.monotonic() + seconds
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return gone(pid)


# ---- greeting ----


def test_hello_tells_version_mode_and_specs(make_shim, specs):
    specs.add_echo("Echo [x] ü")
    shim = make_shim()
    assert shim.greeting["version"] == 1
    assert shim.greeting["role"] == "guest"
    assert shim.greeting["mode"] == "local"
    assert shim.greeting["kernels"] == []
    assert {"echo", "Echo [x] ü"} <= set(shim.specs["kernelspecs"])
    assert shim.specs["kernelspecs"]["echo"]["spec"]["display_name"] == "Echo"


def test_ping_is_echoed(shim):
    shim.link.send(PING, 0, b"\x00abc")
    assert shim.link.wait_kind(PONG).body == b"\x00abc"


def test_nothing_is_said_before_the_host_says_hello(make_shim):
    shim = make_shim(hello=False)
    shim.link.quiet(0.3)
    assert shim.link.inbox == []
    assert shim.hello()["role"] == "guest"


def test_garbage_on_the_link_ends_the_shim(make_shim):
    shim = make_shim()
    shim.link.send_raw(b"GET / HTTP/1.1\r\n\r\n")
    assert shim.process.wait(10) == 0


# ---- traffic ----


def test_busy_comes_first_and_idle_last(echo):
    result = echo.execute("print a\nwarn b\necho c")
    assert [m.type for m in result.messages] == [
        "status", "execute_input", "stream", "stream", "execute_result", "status"]
    assert result.value == "c"
    assert result.text("stderr") == "b\n"
    assert result.reply.parent["session"] == echo.session


def test_the_state_carries_pid_and_kernel_info(shim):
    kernel = shim.start("echo", wait=False)
    state = kernel.wait_state("running")
    assert state["info"]["implementation"] == "echo"
    assert not gone(state["pid"])


def test_messages_sent_before_the_kernel_runs_are_not_lost(shim):
    kernel = shim.start("echo", env={"ECHO_START_DELAY_MS": "300"}, wait=False)
    ids = [kernel.execute(f"echo {i}", wait=False) for i in range(5)]
    kernel.wait_state("running")
    assert [kernel.collect(i).value for i in ids] == ["0", "1", "2", "3", "4"]


def test_a_message_to_a_stream_without_kernel_is_answered(shim):
    shim.link.send(MSG, 9, b"\x00" * 20)
    assert shim.link.wait_kind(STATE, 9).json["state"] == "exited"


def test_a_malformed_message_is_dropped_and_the_next_one_works(shim, echo):
    shim.link.send(MSG, 1, b"\x00\x00\x05\x00" + b"\xff" * 40)
    assert echo.execute("echo on").value == "on"


def test_thousands_of_requests_are_answered_in_order(echo):
    ids = [echo.execute(f"echo {i}", wait=False) for i in range(3000)]
    replies = []
    while len(replies) < len(ids):
        frame = echo.link.wait(lambda f: True)
        if frame.kind == MSG and frame.msg.channel == "shell":
            replies.append(frame.msg.parent_id)
    assert replies == ids


def test_large_messages_pass_both_ways(echo):
    result = echo.execute("display 20000000")
    assert len(result.of("display_data")[0].content["data"]["image/png"]) == 20_000_000
    text = "x" * 9_000_000
    assert echo.execute(f"echo {text}").value == text


def test_binary_buffers_come_back_as_they_were(echo):
    buffers = [b"", bytes(range(256)) * 100, b"\x00"]
    msg_id = echo.send("comm_msg", {"comm_id": "c", "data": {"n": 1}}, buffers=buffers)
    back = echo.wait_msg(lambda m: m.type == "comm_msg" and m.parent_id == msg_id)
    assert back.buffers == buffers
    assert back.content["data"] == {"n": 1}


def test_a_paused_reader_loses_nothing(shim, echo):
    msg_id = echo.execute("lines 30000\nflood 2000000", wait=False)
    time.sleep(1)
    text = echo.collect(msg_id, 120).text()
    lines = text.split("\n")
    assert lines[:30000] == [f"line {i}" for i in range(30000)]
    assert len(text) - len("\n".join(lines[:30000])) - 1 == 2_000_000
    assert echo.execute("echo after").value == "after"


def test_a_closed_window_stops_the_flood_and_control_still_works(shim, echo):
    shim.link.grant = False
    echo.execute("flood 30000000\nsleep 60000", wait=False)
    shim.link.quiet(1.5)
    held = sum(len(f.body) for f in shim.link.inbox if f.kind == MSG)
    assert 3 << 20 < held <= 4 << 20
    assert echo.ctl("interrupt")["ok"]
    other = shim.start("echo", stream=2)
    assert other.execute("echo free").value == "free"


def test_bytes_past_the_protocol_come_before_the_idle(shim, echo):
    msg_id = echo.execute("raw 1 one\nraw 2 two\necho done", wait=False)
    result = echo.collect(msg_id)
    assert result.out == {1: b"one\n", 2: b"two\n"}
    for i in range(20):
        assert echo.execute(f"raw 1 {i}").out[1] == f"{i}\n".encode()


def test_input_is_asked_from_and_answered_to_the_right_request(echo):
    msg_id = echo.execute("input name?", wait=False, allow_stdin=True)
    question = echo.wait_msg(lambda m: m.type == "input_request")
    assert question.channel == "stdin"
    assert question.parent_id == msg_id
    echo.send("input_reply", {"value": "Ada"}, channel="stdin", parent=question.header)
    assert echo.collect(msg_id).value == "Ada"


def test_input_without_permission_is_an_error_at_once(echo):
    assert echo.execute("input ?").reply.content["ename"] == "StdinNotImplementedError"


def test_environment_and_folder_are_those_of_the_start(shim, folder):
    kernel = shim.start("echo", env={"KERNEL_ID": "k 1"}, cwd=str(folder))
    assert kernel.execute("env KERNEL_ID").value == "k 1"
    assert kernel.execute("cwd").value == os.path.realpath(folder)
    assert kernel.execute("env CELLVISOR_LOG").value == ""


def test_spec_environment_expands_variables(shim, make_shim, specs):
    specs.add_echo("env", env={"A": "<${BASE}>", "B": "$NOPE"})
    kernel = make_shim(env={"BASE": "base"})
    kernel.assign()
    kernel = kernel.start("env")
    assert kernel.execute("env A").value == "<base>"
    assert kernel.execute("env B").value == "$NOPE"


# ---- operations ----


def test_interrupt_by_signal_ends_a_sleep(echo):
    msg_id = echo.execute("sleep 60000", wait=False)
    echo.wait_msg(lambda m: m.type == "execute_input")
    assert echo.ctl("interrupt") == {"id": 1, "ok": True}
    result = echo.collect(msg_id)
    assert result.reply.content["ename"] == "KeyboardInterrupt"
    assert echo.execute("echo alive").value == "alive"


def test_interrupt_by_message_ends_a_sleep(make_shim, specs):
    specs.add_echo("m", interrupt_mode="message")
    shim = make_shim()
    shim.assign()
    kernel = shim.start("m")
    msg_id = kernel.execute("sleep 60000", wait=False)
    kernel.wait_msg(lambda m: m.type == "execute_input")
    assert kernel.ctl("interrupt")["ok"]
    assert kernel.collect(msg_id).status == "error"
    # Our own interrupt_request and what it caused is nobody's business.
    assert not [f for f in shim.link.inbox if f.kind == MSG]


def test_interrupt_ends_a_pending_input(echo):
    msg_id = echo.execute("input ?", wait=False, allow_stdin=True)
    echo.wait_msg(lambda m: m.type == "input_request")
    assert echo.ctl("interrupt")["ok"]
    assert echo.collect(msg_id).reply.content["ename"] == "KeyboardInterrupt"


def test_restart_gives_a_new_process_and_tells_starting_then_running(shim, echo):
    before = echo.execute("pid").value
    assert echo.execute("echo x").reply.content["execution_count"] == 2
    number = echo.ctl("restart", wait=False)
    assert shim.link.wait_kind(STATE, 1).json["state"] == "starting"
    assert shim.link.wait_kind(STATE, 1).json["state"] == "running"
    assert echo.wait_done(number)["ok"]
    result = echo.execute("pid")
    assert result.value != before
    assert result.reply.content["execution_count"] == 1
    assert gone(before)


def test_restart_of_a_deaf_kernel_is_enforced(echo):
    pid = echo.execute("pid").value
    echo.execute("spin 60000", wait=False)
    echo.wait_msg(lambda m: m.type == "execute_input")
    os.kill(int(pid), signal.SIGSTOP)
    assert echo.ctl("restart")["ok"]
    assert gone(pid)
    assert echo.execute("echo new").value == "new"


def test_stop_reports_the_end_and_restart_brings_it_back(shim, echo):
    pid = echo.execute("pid").value
    assert echo.ctl("stop")["ok"]
    state = echo.wait_state("exited")
    assert state["reason"] == "stopped"
    assert gone(pid)
    assert echo.ctl("stop")["ok"]
    assert echo.ctl("interrupt")["ok"] is False
    assert echo.ctl("restart")["ok"]
    assert echo.execute("echo back").value == "back"


def test_kill_does_not_wait(echo):
    pid = echo.execute("pid").value
    echo.execute("spin 60000", wait=False)
    assert echo.ctl("kill")["ok"]
    assert echo.wait_state("exited")["signal"] == signal.SIGKILL
    assert gone(pid)


def test_start_after_an_exit_uses_the_same_stream(shim, echo):
    echo.execute("exit 0", wait=False)
    echo.wait_state("exited")
    assert shim.start("echo").execute("echo again").value == "again"


def test_an_unknown_operation_and_a_stream_without_kernel_are_answered(shim, echo):
    assert "unknown operation" in echo.ctl("explode")["error"]
    shim.link.send(18, 7, {"id": 5, "op": "stop"})
    assert shim.link.wait_kind(DONE, 7).json["ok"] is False


def test_operations_during_the_start_are_answered(shim):
    kernel = shim.start("echo", env={"ECHO_START_DELAY_MS": "60000"}, wait=False)
    assert kernel.ctl("interrupt")["ok"] is False
    assert kernel.ctl("stop")["ok"]
    assert kernel.wait_state("exited")["reason"] == "stopped"


# ---- ends ----


@pytest.mark.parametrize("code, reason, exit_code, number", [
    ("exit 7", "exit", 7, None),
    ("exit 0", "exit", 0, None),
    ("abort", "signal", None, signal.SIGABRT),
    ("segv", "signal", None, signal.SIGSEGV),
])
def test_the_end_of_a_kernel_is_told_with_its_reason(echo, code, reason, exit_code, number):
    echo.execute(f"raw 2 last words\n{code}", wait=False)
    state = echo.wait_state("exited")
    assert (state["reason"], state["exit_code"], state["signal"]) == (reason, exit_code, number)
    assert state["tail"].endswith("last words\n")
    assert any(f.kind == OUT and b"last words" in f.body for f in echo.link.inbox)


def test_everything_published_before_a_death_arrives_before_the_state(echo):
    echo.execute("lines 500\nexit 1", wait=False)
    kinds = []
    echo.link.wait(lambda f: kinds.append(f.kind) or f.kind == STATE)
    lines = [f for f in echo.link.inbox if f.kind == MSG and f.msg.type == "stream"]
    assert len(lines) >= 1  # LINGER of a process that _exits is not ours to promise
    assert kinds[-1] == STATE


def test_a_message_to_a_dead_kernel_is_answered_with_its_state(echo):
    echo.execute("exit 3", wait=False)
    echo.wait_state("exited")
    echo.execute("echo x", wait=False)
    assert echo.wait_state("exited")["exit_code"] == 3


def test_a_kernel_killed_from_outside_is_told(echo):
    os.kill(int(echo.execute("pid").value), signal.SIGKILL)
    assert echo.wait_state("exited", 5)["signal"] == signal.SIGKILL


@pytest.mark.parametrize("name, argv, text", [
    ("false", ["sh", "-c", "echo why it fails >&2; exit 4"], "why it fails"),
    ("missing", ["/nonexistent/kernel"], "/nonexistent/kernel"),
    ("nowhere", ["no-such-program"], "no-such-program"),
    ("noexec", ["/etc/passwd"], "/etc/passwd"),
])
def test_a_start_that_fails_says_why_in_bounded_time(make_shim, specs, name, argv, text):
    specs.add(name, argv)
    shim = make_shim()
    shim.assign()
    state = shim.start(name, wait=False).wait_state("exited", 10)
    assert state["reason"] == "start_failed"
    assert text in state["tail"]


def test_an_unknown_spec_names_the_known_ones(shim):
    state = shim.start("pyhton3", wait=False).wait_state("exited", 10)
    assert state["reason"] == "start_failed"
    assert "pyhton3" in state["tail"] and "echo" in state["tail"]


def test_a_kernel_that_never_answers_is_given_up(make_shim, specs):
    specs.add("mute", ["sleep", "1000"])
    shim = make_shim(env={"CELLVISOR_START_TIMEOUT_MS": "700"})
    shim.assign()
    state = shim.start("mute", wait=False).wait_state("exited", 10)
    assert state["reason"] == "start_failed"
    assert "did not answer" in state["tail"]


def test_a_start_in_a_missing_folder_uses_home(shim):
    kernel = shim.start("echo", cwd="/nonexistent/folder")
    assert kernel.execute("cwd").value in (os.path.expanduser("~"), "/")


def test_closing_the_link_ends_every_process(shim, echo):
    second = shim.start("echo", stream=2)
    pids = [echo.execute("pid").value, second.execute("pid").value]
    echo.execute("spawn 60000")
    second.execute("spin 60000", wait=False)
    with open(f"/proc/{pids[0]}/task/{pids[0]}/children") as f:
        pids += f.read().split()
    assert len(pids) == 3
    assert shim.close() == 0
    assert all(wait_gone(p) for p in pids)


def test_a_killed_shim_takes_its_kernels_with_it(make_shim):
    shim = make_shim()
    shim.assign()
    pid = shim.start("echo").execute("pid").value
    shim.process.kill()
    shim.process.wait()
    assert wait_gone(pid)


def test_shutdown_stops_kernels_and_exits(shim, echo):
    pid = echo.execute("pid").value
    shim.link.send(SHUTDOWN, 0, {"grace_ms": 3000})
    assert echo.wait_state("exited")["reason"] == "stopped"
    assert shim.process.wait(10) == 0
    assert gone(pid)


def test_no_descriptor_or_folder_is_left_by_many_restarts(shim, echo):
    def count():
        return len(os.listdir(f"/proc/{shim.process.pid}/fd"))

    echo.ctl("restart")
    before = count()
    for _ in range(20):
        assert echo.ctl("restart")["ok"]
        assert echo.execute("echo x").value == "x"
    assert count() <= before + 1
    run_dir = os.path.join(os.path.dirname(shim.log.name), "r")
    assert len(os.listdir(run_dir)) == 1


# ---- prepare, resume, assign ----


def prepare(shim, **args):
    shim.link.send(PREPARE, 0, args)
    return shim.link.wait_kind(PREPARED).json


def resume(shim, **args):
    shim.link.send(RESUME, 0, {"generation": 1, "entropy": entropy(), "realtime_us": int(time.time() * 1e6),
                               "hostname": "h", "machine_id": "0" * 32, "warmup": None, **args})
    return shim.link.wait_kind(RESUMED).json


def test_prepare_starts_a_kernel_and_assign_hands_it_out(make_shim):
    shim = make_shim()
    answer = prepare(shim, spec="echo", preload="print preloaded")
    assert answer["ok"], answer
    assert answer["info"]["implementation"] == "echo"
    assert shim.assign()["ok"]
    state = shim.link.wait(lambda f: f.kind == STATE and f.json["state"] == "running" and "info" in f.json)
    assert state.stream == 1
    kernel = shim.start("echo")  # taken as it is
    result = kernel.execute("echo first")
    assert result.reply.content["execution_count"] == 1
    assert not [f for f in shim.link.inbox if f.kind == OUT]


@pytest.mark.parametrize("args, text", [
    ({"spec": "nope"}, "nope"),
    ({"spec": "echo", "preload": "error Bad luck"}, "EchoError"),
    ({"spec": "echo", "warmup": "error Cold"}, "warmup"),
    ({"spec": "echo", "preload": "raw 2 dying\nexit 5"}, "exit code 5"),
    ({"spec": "echo", "preload": "sleep 60000", "timeout_ms": 500}, "took too long"),
])
def test_prepare_that_fails_says_at_which_step(make_shim, args, text):
    shim = make_shim()
    answer = prepare(shim, **args)
    assert answer["ok"] is False
    assert text in answer["error"]


def test_resume_restarts_a_kernel_that_has_no_hook(make_shim):
    shim = make_shim()
    assert prepare(shim, spec="echo")["ok"]
    answer = resume(shim, warmup="print warm")
    assert answer["ok"], answer
    assert {"entropy", "clock", "hooks"} <= set(answer["us"])
    states = [f.json["state"] for f in shim.link.inbox if f.kind == STATE]
    assert states == ["starting", "running", "starting", "running"]


def test_resume_keeps_a_kernel_whose_spec_allows_sharing(make_shim, specs):
    specs.add_echo("shared", metadata={"cellvisor": {"resume": "share"}})
    shim = make_shim()
    assert prepare(shim, spec="shared")["ok"]
    assert resume(shim)["ok"]
    states = [f.json["state"] for f in shim.link.inbox if f.kind == STATE]
    assert states == ["starting", "running"]


@pytest.mark.parametrize("args", [{"entropy": None}, {"entropy": "no base64!"}, {"warmup": "error Cold"}])
def test_a_failed_resume_ends_all_service(make_shim, args):
    shim = make_shim()
    assert prepare(shim, spec="echo")["ok"]
    assert resume(shim, **args)["ok"] is False
    assert shim.assign()["ok"] is False
    assert resume(shim)["ok"] is False


def test_commands_that_are_no_json_are_refused(make_shim):
    shim = make_shim()
    shim.link.send(PREPARE, 0, b"{nonsense")
    assert shim.link.wait_kind(PREPARED).json["ok"] is False
    shim.link.send(PREPARE, 0, b"[]")
    assert shim.link.wait_kind(PREPARED).json["ok"] is False
    assert prepare(shim, spec="echo")["ok"]


def test_assign_gives_its_environment_to_kernels_started_later(make_shim, folder):
    shim = make_shim()
    assert shim.assign(env={"KERNEL_USERNAME": "ada"}, cwd=str(folder))["ok"]
    kernel = shim.start("echo")
    assert kernel.execute("env KERNEL_USERNAME").value == "ada"
    assert kernel.execute("cwd").value == os.path.realpath(folder)


def test_a_second_command_while_one_runs_is_refused(make_shim):
    shim = make_shim()
    shim.link.send(PREPARE, 0, {"spec": "echo", "preload": "sleep 500"})
    shim.link.send(PREPARE, 0, {"spec": "echo"})
    first, second = shim.link.wait_kind(PREPARED).json, shim.link.wait_kind(PREPARED).json
    assert first["ok"] is False and "under way" in first["error"]
    assert second["ok"]


# ---- command line ----


def test_a_run_dir_that_is_too_long_is_refused(folder, specs):
    import subprocess

    from conftest import binary

    ours, theirs = socket.socketpair()
    done = subprocess.run(
        [binary("cellvisor-shim", "CELLVISOR_SHIM"), "--local", "--link-fd", str(theirs.fileno()),
         "--run-dir", str(folder / ("d" * 100))],
        pass_fds=[theirs.fileno()], capture_output=True, timeout=20)
    assert done.returncode == 1
    assert b"--run-dir" in done.stderr and b"at most" in done.stderr
    ours.close()
    theirs.close()


def test_wrong_arguments_print_the_usage():
    import subprocess

    from conftest import binary

    shim = binary("cellvisor-shim", "CELLVISOR_SHIM")
    for args in ([], ["--local"], ["--nope"], ["--local", "--link-fd", "3"]):
        done = subprocess.run([shim, *args], capture_output=True, timeout=20)
        assert done.returncode == 2
        assert b"Usage:" in done.stderr
    assert subprocess.run([shim, "--help"], capture_output=True, timeout=20).returncode == 0


def test_specs_prints_json_on_stdout(specs):
    import json
    import subprocess

    from conftest import binary

    done = subprocess.run([binary("cellvisor-shim", "CELLVISOR_SHIM"), "--specs"], capture_output=True,
                          timeout=20, env=dict(os.environ, JUPYTER_PATH=str(specs.folder)))
    assert done.returncode == 0
    assert "echo" in json.loads(done.stdout)["kernelspecs"]


