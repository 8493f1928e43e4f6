"""Section E: prompts."""
import time

from casekit import ALICE, Client, check_end, reply, state, state_files, stdout, within
from wire import wait_for


def answer(ws, prompt, text):
    ws.ask("input_reply", {"value": text, "status": "ok"}, "stdin", parent_header=prompt["header"])


def prompted(m):
    return m["msg_type"] == "input_request"


def test_case_41_a_password_is_kept_nowhere(gw, py, ws):
    request = ws.execute("import getpass;p=getpass.getpass('pw ');print(len(p))", allow_stdin=True)
    prompt = ws.until(prompted)
    assert prompt["content"] == {"prompt": "pw ", "password": True}
    assert prompt["parent_header"]["msg_id"] == request and prompt["channel"] == "stdin"
    answer(ws, prompt, "s3cr€t")
    assert stdout(ws.done(request)) == "6\n"
    with Client(gw, py, session="late") as late:
        late.during(0.3)
        assert "s3cr" not in repr(late.all)
    for secret in ("s3cr€t".encode(), b"s3cr\\u20act"):
        assert secret not in gw.log().encode()
        assert not [path for path, text in state_files(gw) if secret in text]


def test_case_41_a_plain_prompt(gw, ws):
    request = ws.execute("x=input('name? ');print('hello',x)", allow_stdin=True)
    prompt = ws.until(prompted)
    assert prompt["content"] == {"prompt": "name? ", "password": False}
    answer(ws, prompt, "Ada")
    assert stdout(ws.done(request)) == "hello Ada\n"


def test_case_42_a_client_that_cannot_answer(gw, py, ws):
    with within(1):
        out = ws.run("input('q')", allow_stdin=False)
    assert check_end(out)["ename"] == "StdinNotImplementedError"
    with within(1):
        result = gw.run(py, "input('q')")
    assert result["status"] == "error" and result["error"]["ename"] == "StdinNotImplementedError"
    with within(1):
        result = gw.run(py, "import getpass;getpass.getpass()")
    assert result["error"]["ename"] == "StdinNotImplementedError"
    assert ws.value("1") == "1"


def test_case_44_the_prompt_comes_again_after_a_reconnect(gw, py):
    ws = Client(gw, py, session="S")
    request = ws.execute("print('got',input('q'))", allow_stdin=True)
    first = ws.until(prompted)
    ws.abort()
    time.sleep(3)
    with Client(gw, py, session="S") as back:
        again = back.until(prompted)
        assert again["header"]["msg_id"] == first["header"]["msg_id"]
        assert again["parent_header"]["msg_id"] == request
        answer(back, again, "it")
        back.until(lambda m: state(m) == "idle" and m["parent_header"]["msg_id"] == request)
        assert stdout(back.all) == "got it\n"
        # After a restart on the same socket, too.
        assert gw.post(f"/api/kernels/{py}/restart").status_code == 200
        request = back.execute("print('got',input('again'))", allow_stdin=True)
        answer(back, back.until(prompted), "more")
        assert stdout(back.done(request)) == "got more\n"


def test_case_44_a_prompt_that_nobody_will_answer_is_interrupted(fresh):
    g = fresh("--replay-ttl", "2")
    k = g.kernel(name="python3")
    ws = Client(g, k, session="S")
    ws.execute("input('q')", allow_stdin=True)
    ws.until(prompted)
    ws.abort()
    with Client(g, k, session="other") as other:
        wait_for(lambda: g.model(k)["execution_state"] == "idle", 10, "the prompt is given up")
        assert other.value("1+1") == "2"
        assert not [m for m in other.all if prompted(m)]


def test_case_44_an_interrupt_ends_a_prompt(gw, py, ws):
    request = ws.execute("input('q')", allow_stdin=True)
    ws.until(prompted)
    assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
    out = ws.done(request)
    assert reply(out)["ename"] == "KeyboardInterrupt"
    assert ALICE not in repr(out)
