"""The shim and its hook with a real ipykernel (the field cases that a kernel's side decides)."""

import os
import signal
import time

import pytest
from guestlink import MSG, OUT, PREPARE, PREPARED, STATE
from test_shim_echo import prepare, resume


def streams(result):
    return [(m.content["name"], m.content["text"]) for m in result.of("stream")]


def test_the_kernel_starts_with_the_hook_and_says_nothing_of_its_own(shim, python):
    shim.link.quiet(0.5)
    assert [str(f) for f in shim.link.inbox] == []
    assert "with hook" in shim.log_text()


def test_a_cell_runs_and_counts_from_one(python):
    result = python.execute("print('hi')\n1+1")
    assert (result.value, result.text(), result.reply.content["execution_count"]) == ("2", "hi\n", 1)


def test_the_hook_leaves_no_trace_in_the_environment(python):
    assert python.execute("import os, sys\n"
                          "[k for k in os.environ if 'CELLVISOR' in k or k == 'PYTHONPATH'], "
                          "[p for p in sys.path if os.path.exists(p + '/cellvisor_hook.py')], "
                          "[n for n in globals() if 'cellvisor' in n.lower()]").value == "([], [], [])"


# ---- output ----


def test_stdout_and_stderr_keep_their_order(python):
    result = python.execute("import sys\nfor i in range(3):\n"
                            "    print('E', i, file=sys.stderr); print('O', i)")
    assert streams(result) == [("stderr", "E 0\n"), ("stdout", "O 0\n"), ("stderr", "E 1\n"),
                               ("stdout", "O 1\n"), ("stderr", "E 2\n"), ("stdout", "O 2\n")]


def test_output_of_child_processes_keeps_its_place(python):
    for code in ("import os; os.system('echo child')", "import subprocess; subprocess.run(['echo', 'child'])",
                 "import subprocess, sys; subprocess.run(['echo', 'child'], stdout=sys.stdout)",
                 "import os; os.write(1, b'child\\n')"):
        result = python.execute(f"print('before')\n{code}\nprint('after')")
        assert result.text() == "before\nchild\nafter\n", code


def test_stderr_of_child_processes_is_stderr(python):
    assert python.execute("import os\nos.system('echo bad >&2');").text("stderr") == "bad\n"


def test_a_character_written_in_pieces_stays_whole(python):
    result = python.execute("import os, time\nfor b in '≤'.encode():\n"
                            "    os.write(1, bytes([b])); time.sleep(.05)\nos.write(1, b'\\n');")
    assert result.text() == "≤\n"


def test_half_a_surrogate_pair_loses_nothing_else(python):
    result = python.execute(r"print('A\ud800B')")
    assert result.status == "ok"
    assert result.text() == "A\ufffdB\n"
    assert result.text("stderr") == ""
    result = python.execute(r"from IPython.display import display" "\n"
                            r"display({'text/plain': 'x\udc80y é'}, raw=True)")
    assert result.of("display_data")[0].content["data"]["text/plain"] == "x\ufffdy é"


def test_a_fork_that_leaves_by_itself(python):
    result = python.execute("import os\npid = os.fork()\nif pid == 0:\n"
                            "    print('child', flush=True); os._exit(0)\nos.waitpid(pid, 0); print('parent')")
    assert sorted(result.text().split()) == ["child", "parent"]


def test_a_fork_that_runs_on_does_not_come_back_into_the_kernel(python):
    result = python.execute("import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0); print('parent')\n"
                            "else:\n    print('child')")
    assert sorted(result.text().split()) == ["child", "parent"]
    assert python.execute("6*7").value == "42"
    assert not [f for f in python.link.inbox if f.kind == MSG and f.msg.channel == "shell"]


def test_output_of_worker_processes_arrives(python):
    result = python.execute("from concurrent.futures import ProcessPoolExecutor as P\nimport multiprocessing as m\n"
                            "def f(x):\n    print('w', x, flush=True); return x * x\n"
                            "with P(2, mp_context=m.get_context('fork')) as p: print(list(p.map(f, range(3))))")
    text = result.text()
    assert "[0, 1, 4]" in text
    assert all(str(i) in text for i in range(3)) and text.count("w") == 3


def test_late_output_of_a_thread_arrives_with_its_parent(python):
    msg_id = python.execute("import threading, time\nthreading.Thread(target=lambda: "
                            "(time.sleep(.5), print('late', flush=True))).start()").msg_id
    late = python.wait_msg(lambda m: m.type == "stream")
    assert late.content["text"] == "late\n"
    assert late.parent_id == msg_id


def test_flushed_lines_to_a_paused_reader_are_all_there(shim, python):
    n = 4000
    msg_id = python.execute(f"import sys\nfor i in range({n}):\n"
                            "    sys.stdout.write(f'chunk-{i}\\n'); sys.stdout.flush()", wait=False)
    shim.link.grant = False
    time.sleep(1)
    shim.link.grant = True
    assert python.collect(msg_id, 120).text().split() == [f"chunk-{i}" for i in range(n)]
    assert python.execute("1").value == "1"


def test_a_shut_window_makes_the_cell_wait_instead_of_dropping(shim, python):
    """More than the window, ZMQ's high-water marks and the shim's queue hold together."""
    shim.link.grant = False
    msg_id = python.execute("import sys\nfor i in range(9000):\n"
                            "    sys.stdout.write(f'{i:06d}' + 'x' * 994); sys.stdout.flush()", wait=False)
    shim.link.quiet(2)
    held = [f for f in shim.link.inbox if f.kind == MSG]
    assert sum(len(f.body) for f in held) <= 4 << 20
    shim.link.grant = True
    credit = sum(len(f.body) for f in held)
    shim.link.owed = {}
    import struct
    shim.link.send(14, 1, struct.pack("<I", credit))
    text = python.collect(msg_id, 120).text()
    assert [text[i : i + 6] for i in range(0, len(text), 1000)] == [f"{i:06d}" for i in range(9000)]


# ---- execution ----


def test_await_works_and_asyncio_run_says_why_not(python):
    result = python.execute("import asyncio\nasync def f(): return 7\nasyncio.run(f())")
    assert result.reply.content["ename"] == "RuntimeError"
    assert "running event loop" in result.reply.content["evalue"]
    assert python.execute("await f()").value == "7"


def test_interrupt_of_a_sleep_keeps_the_variables(python):
    python.execute("x = 41")
    msg_id = python.execute("import time; time.sleep(60)", wait=False)
    python.wait_msg(lambda m: m.type == "execute_input")
    assert python.ctl("interrupt")["ok"]
    assert python.collect(msg_id, 10).reply.content["ename"] == "KeyboardInterrupt"
    assert python.execute("x + 1").value == "42"


def test_interrupt_of_an_input_ends_it(python):
    msg_id = python.execute("input('?')", wait=False, allow_stdin=True)
    python.wait_msg(lambda m: m.type == "input_request")
    assert python.ctl("interrupt")["ok"]
    assert python.collect(msg_id, 10).reply.content["ename"] == "KeyboardInterrupt"


def test_interrupt_leaves_no_child_of_the_cell_behind(python):
    mark = 1000 + os.getpid()
    msg_id = python.execute(f"import subprocess; subprocess.run('sleep {mark} & sleep {mark}; wait', shell=True)",
                            wait=False)
    python.wait_msg(lambda m: m.type == "execute_input")
    time.sleep(0.5)
    assert python.ctl("interrupt")["ok"]
    assert python.collect(msg_id, 10).reply.content["ename"] == "KeyboardInterrupt"
    end = time.monotonic() + 10
    while os.system(f"pgrep -f '^sleep {mark}$' >/dev/null") == 0 and time.monotonic() < end:
        time.sleep(0.05)
    assert os.system(f"pgrep -f '^sleep {mark}$' >/dev/null") != 0


def test_interrupt_spares_what_the_user_detached(python):
    mark = 2000 + os.getpid()
    python.execute(f"import subprocess\np = subprocess.Popen(['sh', '-c', 'sleep {mark} & :'], start_new_session=True)\n"
                   "p.wait()")
    msg_id = python.execute("import time; time.sleep(60)", wait=False)
    python.wait_msg(lambda m: m.type == "execute_input")
    assert python.ctl("interrupt")["ok"]
    python.collect(msg_id, 10)
    time.sleep(1.5)
    assert os.system(f"pgrep -f '^sleep {mark}$' >/dev/null") == 0


@pytest.mark.parametrize("code, reason, exit_code, number, words", [
    ("import os; os._exit(7)", "exit", 7, None, ""),
    ("import ctypes; ctypes.string_at(0)", "signal", None, signal.SIGSEGV, ""),
    ("import os; os.kill(os.getpid(), 9)", "signal", None, signal.SIGKILL, ""),
    ("import os; os.write(2, b'last words'); os._exit(3)", "exit", 3, None, "last words"),
])
def test_a_death_is_told_with_reason_and_last_words(python, code, reason, exit_code, number, words):
    python.execute(code, wait=False)
    state = python.wait_state("exited", 10)
    assert (state["reason"], state["exit_code"], state["signal"]) == (reason, exit_code, number)
    said = state["tail"] + "".join(f.msg.content["text"] for f in python.link.inbox
                                   if f.kind == MSG and f.msg.type == "stream")
    assert words in said


def test_restart_gives_a_fresh_interpreter_and_session(shim, python):
    first = python.execute("x = 1").reply.header["session"]
    assert python.ctl("restart")["ok"]
    result = python.execute("x")
    assert result.reply.content["ename"] == "NameError"
    assert result.reply.header["session"] != first


def test_restart_during_an_endless_loop(python):
    python.execute("while True: pass", wait=False)
    python.wait_msg(lambda m: m.type == "execute_input")
    assert python.ctl("restart", timeout=30)["ok"]
    assert python.execute("1").value == "1"


# ---- figures ----


def test_figures_show_without_magics_also_after_a_style_context(python):
    if python.execute("import matplotlib", timeout=120).status != "ok":
        pytest.skip("NO MATPLOTLIB in the environment of the kernels")
    python.ctl("restart")
    result = python.execute("import matplotlib.pyplot as plt\nfrom matplotlib.dates import DateFormatter\n"
                            "with plt.style.context('ggplot'):\n    fig, ax = plt.subplots()\n"
                            "    ax.xaxis.set_major_formatter(DateFormatter('%H:%M'))", timeout=120)
    assert [list(m.content["data"]) for m in result.of("display_data")] == [["text/plain", "image/png"]]
    result = python.execute("fig, ax = plt.subplots()", timeout=120)
    assert len(result.of("display_data")) == 1


# ---- prepare, resume, assign ----

PRELOAD = "import random, tempfile, uuid\nrandom.seed(1)\n_ = None"
DRAW = "import random, os, uuid; (random.random(), os.getpid())"


def test_resume_reseeds_and_leaves_a_clean_slate(make_shim, python):
    first = python.execute("import random; random.seed(1); random.random()").value
    shim = make_shim()
    assert prepare(shim, spec="python3", preload="import random; random.seed(1)")["ok"]
    answer = resume(shim, warmup="import decimal; print('warm'); 40 + 2")
    assert answer["ok"], answer
    assert shim.assign(env={"KERNEL_ID": "abc"}, cwd="/usr")["ok"]
    kernel = shim.start("python3")
    result = kernel.execute("import random; random.random()")
    assert result.value != first
    assert result.reply.content["execution_count"] == 1
    assert kernel.execute("import os; os.environ['KERNEL_ID'], os.getcwd()").value == "('abc', '/usr')"
    result = kernel.execute("len(In), sorted(Out), [r[2] for r in get_ipython().history_manager.get_range()]")
    n, out, lines = eval(result.value)
    assert (n, out, lines[0], len(lines)) == (4, [1, 2], "import random; random.random()", 3)
    assert not [f for f in shim.link.inbox if f.kind in (MSG, OUT) and "warm" in str(f)]


def test_resume_changes_session_and_key(make_shim, python):
    shim = make_shim()
    assert prepare(shim, spec="python3")["ok"]
    path = os.path.join(os.path.dirname(shim.log.name), "r", "k1-1", "connection.json")
    with open(path) as f:
        before = f.read()
    assert resume(shim)["ok"]
    with open(path) as f:
        after = f.read()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert before != after
    shim.assign()
    kernel = shim.start("python3")
    first = kernel.execute("1").reply.header
    assert resume(shim)["ok"]  # a branch of a running sandbox
    second = kernel.execute("2").reply.header
    assert first["session"] != second["session"]
    assert first["msg_id"].split("_")[0] != second["msg_id"].split("_")[0]


def test_prepare_reports_the_traceback_of_a_bad_preload(make_shim, python):
    shim = make_shim()
    shim.link.send(PREPARE, 0, {"spec": "python3", "preload": "import math\nimport no_such_module"})
    answer = shim.link.wait_kind(PREPARED).json
    assert answer["ok"] is False
    assert "preload" in answer["error"] and "no_such_module" in answer["error"]
    assert shim.link.wait(lambda f: f.kind == STATE and f.json["state"] == "running")


def test_a_kernel_whose_hook_cannot_load_is_served_but_not_shared(make_shim, python, folder):
    broken = folder / "hook"
    broken.mkdir()
    (broken / "cellvisor_hook.py").write_text("raise ImportError('broken')")
    shim = make_shim(env={"CELLVISOR_HOOK_DIR": str(broken)})
    answer = prepare(shim, spec="python3")
    assert answer["ok"] is False and "hook" in answer["error"]
    shim = make_shim(env={"CELLVISOR_HOOK_DIR": str(broken)})
    shim.assign()
    result = shim.start("python3").execute("print(1)\n2")
    assert (result.value, result.text()) == ("2", "1\n")


# ---- standby kernel ----

FACTS = "import os, random; (os.getpid(), os.environ.get('KERNEL_ID'), os.getcwd(), random.random(), 'x' in globals())"


@pytest.fixture
def standby(make_shim, python):
    """A shim with a kernel that was prepared, resumed and assigned, and a standby kernel behind it."""
    shim = make_shim(env={"CELLVISOR_STANDBY": "1", "CELLVISOR_STANDBY_MS": "100"})
    assert prepare(shim, spec="python3", preload="import random; random.seed(7); PRELOADED = 1")["ok"]
    assert "standby kernel is ready" in shim.log_text()
    assert resume(shim)["ok"]
    assert shim.assign(env={"KERNEL_ID": "abc"}, cwd="/usr")["ok"]
    return shim


def states(shim):
    return [f.json["state"] for f in shim.link.inbox if f.kind == STATE]


def test_restart_promotes_the_standby_kernel(standby):
    kernel = standby.start("python3")
    first = eval(kernel.execute("x = 1\n" + FACTS).value)
    session = kernel.execute("1").reply.header["session"]
    standby.link.inbox.clear()
    assert kernel.ctl("restart")["ok"]
    assert states(standby) == ["starting", "running"]
    result = kernel.execute(FACTS)
    second = eval(result.value)
    assert "standby kernel takes over" in standby.log_text()
    assert second[1:3] == ("abc", "/usr")
    assert second[0] != first[0] and second[3] != first[3] and second[4] is False
    assert result.reply.content["execution_count"] == 1
    assert result.reply.header["session"] != session
    import random
    random.seed(7)
    assert second[3] != random.random()
    assert kernel.execute("PRELOADED").value == "1"


def test_a_restart_without_a_standby_starts_from_scratch_and_the_next_one_has_it_again(standby):
    kernel = standby.start("python3")
    assert kernel.ctl("restart")["ok"]
    assert kernel.ctl("restart")["ok"]  # at once: the next standby is not ready
    assert kernel.execute("6*7").value == "42"
    assert standby.log_text().count("takes over") == 1
    end = time.monotonic() + 30
    while standby.log_text().count("standby kernel is ready") < 2 and time.monotonic() < end:
        standby.link.quiet(0.1)
    assert kernel.ctl("restart")["ok"]
    assert standby.log_text().count("takes over") == 2
    assert kernel.execute("6*7").value == "42"


def test_messages_sent_right_behind_a_restart_reach_the_new_process(standby):
    kernel = standby.start("python3")
    before = kernel.execute("import os; os.getpid()").value
    kernel.ctl("restart", wait=False)
    kernel.wait_state("starting")
    msg_id = kernel.execute("import os; os.getpid()", wait=False)
    assert kernel.collect(msg_id).value != before


def test_a_dead_kernel_comes_back_as_the_standby(standby):
    kernel = standby.start("python3")
    kernel.execute("import os; os._exit(3)", wait=False)
    kernel.wait_state("exited")
    assert kernel.ctl("restart")["ok"]
    assert "takes over" in standby.log_text()
    assert kernel.execute("6*7").value == "42"


def test_a_standby_that_was_killed_is_not_missed(standby):
    kernel = standby.start("python3")
    pid = int(standby.log_text().split("standby kernel is ready, pid ")[1].split('"')[0])
    os.kill(pid, signal.SIGKILL)
    assert kernel.ctl("restart")["ok"]
    assert kernel.execute("6*7").value == "42"
    assert standby.close() == 0


def test_a_frozen_standby_is_not_served(standby):
    """It cannot be reseeded: the hook does not answer, and a start from scratch takes over."""
    kernel = standby.start("python3")
    pid = int(standby.log_text().split("standby kernel is ready, pid ")[1].split('"')[0])
    os.kill(pid, signal.SIGSTOP)
    assert kernel.ctl("restart", timeout=40)["ok"]
    assert kernel.execute("import os; os.getpid()").value != str(pid)


def test_the_standby_is_seen_by_nobody_and_ends_with_the_shim(standby):
    pid = int(standby.log_text().split("standby kernel is ready, pid ")[1].split('"')[0])
    assert all(f.stream == 1 for f in standby.link.inbox if f.kind == STATE)
    assert standby.close() == 0
    assert not os.path.exists(f"/proc/{pid}")
