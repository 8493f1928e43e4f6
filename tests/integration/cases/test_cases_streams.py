"""Section B: streams, threads, descriptors, children."""
import time

from casekit import check_end, data, reply, state, states, stderr, stdout, types
from wire import wait_for


def test_case_10_stdout_and_stderr_keep_the_order_of_writing(gw, ws):
    out = ws.run("import sys\nfor i in range(3):\n    print('E',i,file=sys.stderr); print('O',i)")
    assert stdout(out) == "O 0\nO 1\nO 2\n" and stderr(out) == "E 0\nE 1\nE 2\n"
    assert "".join(m["content"]["text"] for m in out if m["msg_type"] == "stream") == \
        "E 0\nO 0\nE 1\nO 1\nE 2\nO 2\n"


def test_case_11_a_thread_prints_into_the_cell_that_started_it(gw, ws):
    """The rule of newer ipykernel."""
    ws.run("import threading,time\ngo=threading.Event()\n"
           "t=threading.Thread(target=lambda:(go.wait(),print('from the thread',flush=True)))")
    first = ws.execute("t.start()")
    ws.done(first)
    second = ws.execute("go.set();t.join()")
    ws.done(second)
    ws.during(0.3)
    assert "from the thread\n" in stdout(ws.of(first)) + stdout(ws.of(second))


def test_case_12_output_after_the_idle_reaches_the_client(gw, py, ws):
    request = ws.execute("import threading,time;"
                         "threading.Thread(target=lambda:(time.sleep(2),print('late',flush=True))).start()")
    ws.done(request)
    before = gw.model(py)["last_activity"]
    late = ws.until(lambda m: m["msg_type"] == "stream")
    assert late["content"] == {"name": "stdout", "text": "late\n"}
    assert late["parent_header"]["msg_id"] == request
    model = gw.model(py)
    assert model["execution_state"] == "idle" and model["last_activity"] > before


def test_case_13_half_a_surrogate_pair_loses_nothing_else(gw, ws):
    out = ws.run(r"print('A\ud800B')")
    assert check_end(out)["status"] == "ok"
    text = stdout(out)
    assert text.startswith("A") and text.endswith("B\n")
    assert stderr(out) == ""
    out = ws.run(r"'C\udc00D'")
    assert check_end(out)["status"] == "ok" and data(out)[0]["text/plain"].startswith("'C")


def test_case_15_a_character_written_byte_by_byte_stays_whole(gw, ws):
    out = ws.run("import os,time\nfor b in '≤'.encode():\n    os.write(1,bytes([b])); time.sleep(.15)\n"
                 "os.write(1,b'\\n')")
    ws.during(0.5)
    assert stdout(ws.all) == "≤\n"
    assert check_end(out)["status"] == "ok"


def test_case_16_carriage_returns_pass_unchanged(gw, ws):
    """The folded view is the unit test of kernelmgr/text.c and the text of `cellvisor run`."""
    out = ws.run("import time\nfor i in range(50):\n    print(f'\\r{i+1}/50',end='',flush=True); time.sleep(.02)\n"
                 "print()")
    assert stdout(out) == "".join(f"\r{i + 1}/50" for i in range(50)) + "\n"


def test_case_18_a_child_on_sys_stdout_shows_in_the_cell(gw, ws):
    out = ws.run("import subprocess,sys;subprocess.run(['echo','hi'],stdout=sys.stdout);print('after')")
    assert check_end(out)["status"] == "ok"
    assert stdout(out) == "hi\nafter\n"


def test_case_18_os_system_and_inherited_descriptors(gw, ws):
    out = ws.run("import os\nprint('one');os.system('echo two; echo three >&2');print('four')")
    assert stdout(out) == "one\ntwo\nfour\n" and stderr(out) == "three\n"


def check_family(text, words, last):
    """A child's output goes through a socket of its own in ipykernel, and a print there is two writes: all of it
    comes, lines of several processes may mix."""
    assert [text.count(w) for w in words] == [1] * len(words), text
    assert len(text) == sum(len(w) + 1 for w in words) and last in text


def test_case_19_fork_in_a_cell(gw, ws):
    request = ws.execute("import os\npid=os.fork()\nif pid==0:\n    print('child',flush=True); os._exit(0)\n"
                         "os.waitpid(pid,0);print('parent')")
    ws.done(request)
    ws.during(0.5)
    out = ws.of(request)
    assert reply(out)["status"] == "ok" and states(out) == ["busy", "idle"]
    check_family(stdout(out), ["child", "parent"], "parent\n")


def test_case_19_a_child_that_comes_back_from_the_cell(gw, py, ws):
    request = ws.execute("import os\npid=os.fork()\nif pid==0:\n    print('child',flush=True)\n"
                         "else:\n    print('parent')")
    ws.done(request)
    ws.during(1)
    out = ws.of(request)
    assert reply(out)["status"] == "ok" and states(out) == ["busy", "idle"]
    check_family(stdout(out), ["child", "parent"], "parent\n")
    assert ws.value("1+1") == "2"
    # The child is gone, not a second kernel.
    wait_for(lambda: ws.value("import os\ntry: r=os.waitpid(pid,os.WNOHANG)\nexcept ChildProcessError: r=(pid,0)\n"
                              "r[0]==pid") == "True", 10, "the child ends")


def test_case_19_children_of_multiprocessing_print_into_the_cell(gw, ws):
    request = ws.execute("import multiprocessing as mp\nctx=mp.get_context('fork')\n"
                         "p=[ctx.Process(target=print,args=(f'worker {i}',),kwargs={'flush':True}) for i in range(4)]\n"
                         "[q.start() for q in p];[q.join() for q in p];print('all')")
    ws.done(request)
    ws.during(0.5)
    assert reply(ws.of(request))["status"] == "ok"
    check_family(stdout(ws.of(request)), [f"worker {i}" for i in range(4)] + ["all"], "all\n")


def test_case_12_nothing_of_it_changes_the_state_of_the_kernel(gw, py, ws):
    ws.run("import threading,time\ndef f():\n    for i in range(20): time.sleep(.02); print(i,flush=True)\n"
           "threading.Thread(target=f).start()")
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        assert gw.model(py)["execution_state"] == "idle"
    out = ws.during(0.2)
    assert "stream" in types(ws.all) and not [m for m in out if state(m)]
