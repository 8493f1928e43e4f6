"""Sections G (rich display), H (widgets, debugger) and I (completion, history)."""
import concurrent.futures

from casekit import Client, check_end, data, reply, state, stderr, stdout, types, within


def test_case_71_text_picture_text(gw, ws):
    out = ws.run("import matplotlib.pyplot as plt\nprint('before');plt.plot([1]);plt.show();print('after')")
    check_end(out)
    shown = [m for m in out if m["msg_type"] in ("stream", "display_data", "execute_result")]
    assert types(shown) == ["stream", "display_data", "stream"]
    assert shown[0]["content"]["text"] == "before\n" and shown[2]["content"]["text"] == "after\n"
    assert "image/png" in shown[1]["content"]["data"] and stderr(out) == ""


def test_case_72_figures_show_after_a_style_context(gw, ws):
    first = ws.run("import matplotlib.pyplot as plt\nfrom matplotlib.dates import DateFormatter\n"
                   "with plt.style.context('ggplot'):\n    fig,ax=plt.subplots();"
                   "ax.xaxis.set_major_formatter(DateFormatter('%H:%M'))")
    second = ws.run("fig,ax=plt.subplots()")
    for out in (first, second):
        assert check_end(out)["status"] == "ok"
        assert [d for d in data(out) if "image/png" in d], types(out)


def test_case_74_vendor_json_stays_json(gw, py, ws):
    code = ("from IPython.display import display\ndisplay({'application/vnd.plotly.v1+json':{'data':[{'type':'bar',"
            "'y':[1,2]}],'layout':{}},'text/plain':'Figure'},raw=True)")
    (shown,) = data(ws.run(code))
    assert shown["application/vnd.plotly.v1+json"]["data"][0]["y"] == [1, 2]
    assert gw.run(py, code)["outputs"][0]["data"] == shown


def test_case_75_every_mime_type_and_its_metadata(gw, py, ws):
    code = ("class C:\n  def _repr_mimebundle_(s,include=None,exclude=None): return "
            "({'application/vnd.vegalite.v5+json':{'mark':'bar'},'application/vnd.bokehjs_exec.v0+json':'',"
            "'text/html':'<p>h</p>','text/plain':'C'},{'application/vnd.bokehjs_exec.v0+json':{'id':'p1'}})\nC()")
    (result,) = [m["content"] for m in ws.run(code) if m["msg_type"] == "execute_result"]
    assert set(result["data"]) == {"application/vnd.vegalite.v5+json", "application/vnd.bokehjs_exec.v0+json",
                                   "text/html", "text/plain"}
    assert result["metadata"]["application/vnd.bokehjs_exec.v0+json"] == {"id": "p1"}
    output = gw.run(py, code)["outputs"][0]
    assert output["data"] == result["data"] and output["metadata"] == result["metadata"]


def test_case_77_an_update_reaches_all_of_one_display_id(gw, py, ws):
    first = ws.run("display('a',display_id='X')")
    second = ws.run("h=display('b',display_id='X',update=False) or None\n"
                    "from IPython.display import update_display\nupdate_display('z',display_id='X')")
    rich = [m for m in first + second if m["msg_type"] in ("display_data", "update_display_data")]
    assert types(rich) == ["display_data", "display_data", "update_display_data"]
    assert all(m["content"]["transient"] == {"display_id": "X"} for m in rich)
    # The stored view shows the newest: within one run and across two that overlap.
    result = gw.run(py, "display('a',display_id='Y');display('b',display_id='Y')\n"
                        "update_display('z',display_id='Y')")
    assert [o["data"]["text/plain"] for o in result["outputs"]] == ["'z'", "'z'"]


def test_case_77_an_update_from_a_later_cell_reaches_an_earlier_result(gw, py):
    """The first run still waits for its reply when the second one's update passes: both are views of one log."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool, Client(gw, py) as ws:
        first = pool.submit(gw.run, py, "import time\ndisplay('a',display_id='X');time.sleep(1)")
        ws.until(lambda m: m["msg_type"] == "display_data")
        second = pool.submit(gw.run, py, "from IPython.display import update_display\n"
                                         "display('b',display_id='X');update_display('z',display_id='X')")
        assert first.result(20)["status"] == "ok"
        assert [o["data"]["text/plain"] for o in second.result(20)["outputs"]] == ["'z'"]


def test_case_78_updates_after_the_cell(gw, ws):
    request = ws.execute("import threading,time\nh=display('0',display_id='p')\ndef f():\n"
                         "  for i in range(3): time.sleep(.4); h.update(str(i+1))\n"
                         "threading.Thread(target=f).start()")
    ws.done(request)
    seen = [ws.until(lambda m: m["msg_type"] == "update_display_data") for _ in range(3)]
    assert [m["content"]["data"]["text/plain"] for m in seen] == ["'1'", "'2'", "'3'"]
    assert all(m["content"]["transient"] == {"display_id": "p"} for m in seen)


def test_case_80_a_data_frame(gw, py):
    with Client(gw, py, session="a") as ws:
        out = ws.run("import pandas as pd\ndf=pd.DataFrame({'a':[1,float('nan')],'b':['x','<b>']})\ndf")
        (shown,) = data(out)
        assert "&lt;b&gt;" in shown["text/html"] and "NaN" in shown["text/html"] and "NaN" in shown["text/plain"]
        assert stderr(out) == "" and stdout(out) == ""
        assert ws.value("len(df)") == "2"
    with Client(gw, py, session="b") as ws:
        assert ws.value("df.shape") == "(2, 2)"


def test_case_81_widgets_after_a_reload(gw, py):
    with Client(gw, py, session="before") as ws:
        out = ws.run("import ipywidgets as w;s=w.IntSlider(value=7);s")
        assert "application/vnd.jupyter.widget-view+json" in data(out)[0]
    with Client(gw, py, session="after") as ws:
        comms = reply(ws.done(ws.ask("comm_info_request", {"target_name": "jupyter.widget"})))["comms"]
        assert len(comms) >= 3
        values = []
        for comm in comms:
            request = ws.ask("comm_msg", {"comm_id": comm, "data": {"method": "request_state"}})
            m = ws.until(lambda m, r=request: m["msg_type"] == "comm_msg" and m["parent_header"]["msg_id"] == r)
            assert m["content"]["comm_id"] == comm and m["content"]["data"]["method"] == "update"
            values.append(m["content"]["data"]["state"].get("value"))
        assert 7 in values


def debug(ws, command, **arguments):
    debug.seq += 1
    return ws.ask("debug_request", {"type": "request", "seq": debug.seq, "command": command, "arguments": arguments},
                  "control")


debug.seq = 0


def event(ws, name):
    return ws.until(lambda m: m["msg_type"] == "debug_event" and m["content"].get("event") == name)


def debug_reply(ws, request):
    m = ws.until(lambda m: m["channel"] == "control" and m["parent_header"].get("msg_id") == request)
    return m["content"]


CELL = "x = 1\ny = 2\nz = 3\n"


def stop_at_line_2(ws):
    """A debugger session up to a stop in a cell; the cell's request."""
    assert debug_reply(ws, debug(ws, "initialize", clientID="test", adapterID="", pathFormat="path"))["success"]
    debug_reply(ws, debug(ws, "attach"))
    path = debug_reply(ws, debug(ws, "dumpCell", code=CELL))["body"]["sourcePath"]
    marks = debug(ws, "setBreakpoints", breakpoints=[{"line": 2}], source={"path": path}, sourceModified=False)
    ws.done(marks)
    ws.done(debug(ws, "configurationDone"))
    request = ws.execute(CELL)
    event(ws, "stopped")
    return request


def test_case_68_a_stop_at_a_breakpoint_leaves_control_alive(gw, py, ws):
    """Breakpoints after an interrupt at a stop are not met: docs/cases.md."""
    request = stop_at_line_2(ws)
    with within(1, "kernel_info on control during the stop"):
        ws.done(ws.ask("kernel_info_request", channel="control"))
    assert gw.model(py)["execution_state"] == "busy"
    assert gw.post(f"/api/kernels/{py}/interrupt").status_code == 204
    assert reply(ws.done(request))["ename"] == "KeyboardInterrupt"
    ws.done(debug(ws, "disconnect", restart=False, terminateDebuggee=False))
    assert ws.value("x") == "1"
    assert gw.post(f"/api/kernels/{py}/restart").status_code == 200
    request = stop_at_line_2(ws)
    ws.done(debug(ws, "continue", threadId=1), request)
    assert ws.value("z") == "3"


def test_case_84_debug_requests_keep_their_order(gw, ws):
    ws.done(debug(ws, "initialize", clientID="test", adapterID="", pathFormat="path"))
    sent = [debug(ws, "attach"), debug(ws, "setBreakpoints", breakpoints=[], source={"path": "/tmp/x.py"}),
            debug(ws, "configurationDone")]
    out = ws.done(*sent)
    replies = [m for m in out if m["msg_type"] == "debug_reply"]
    assert [m["parent_header"]["msg_id"] for m in replies] == sent
    assert [m["content"]["request_seq"] for m in replies] == [debug.seq - 2, debug.seq - 1, debug.seq]
    assert [m for m in ws.all if m["msg_type"] == "debug_event"]
    ws.done(debug(ws, "disconnect", restart=False, terminateDebuggee=False))


def test_case_86_every_cursor_position_is_answered(gw, ws):
    ws.run("abcd = 1")
    ws.done(ws.ask("complete_request", {"code": "abc", "cursor_pos": 3}))  # the completer's own imports
    for position in (0, 3, 99, -1):
        with within(1, f"complete_request at {position}"):
            out = ws.done(ws.ask("complete_request", {"code": "abc", "cursor_pos": position}))
        assert check_end(out)["status"] in ("ok", "error")
        with within(1, f"inspect_request at {position}"):
            out = ws.done(ws.ask("inspect_request", {"code": "len", "cursor_pos": position, "detail_level": 0}))
        assert check_end(out)["status"] in ("ok", "error")
    # 0 is the start of the text, not "unset"; positions count code points.
    got = reply(ws.done(ws.ask("complete_request", {"code": "abc", "cursor_pos": 0})))
    assert (got["cursor_start"], got["cursor_end"]) == (0, 0)
    got = reply(ws.done(ws.ask("complete_request", {"code": "'\U0001f600';abc", "cursor_pos": 7})))
    assert "abcd" in got["matches"] and got["cursor_end"] == 7
    assert ws.value("1") == "1"


def test_case_87_history_passes_through(gw, ws):
    ws.run("1+1")
    ask = {"output": True, "raw": True, "hist_access_type": "range", "session": 0, "start": 1, "stop": 2}
    got = reply(ws.done(ws.ask("history_request", ask)))
    assert [entry[1:] for entry in got["history"]] == [[1, ["1+1", "2"]]]
    ask = {"output": True, "raw": True, "hist_access_type": "tail", "n": 1}
    answer = ws.done(ws.ask("history_request", ask))
    (entry,) = reply(answer)["history"]
    assert entry[2][1] is None
    assert [state(m) for m in answer if state(m)] == ["busy", "idle"]
