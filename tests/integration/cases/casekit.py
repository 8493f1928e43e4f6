"""A kernel client that gathers messages by the request they belong to."""
import contextlib
import json
import pathlib
import time

import gateway_conftest
import wire

ALICE, BOB = gateway_conftest.ALICE, gateway_conftest.BOB
SLACK = 3  # time bounds of the cases, times this: test machines are busy


class Client(wire.Kernel):
    def __init__(self, gw, kernel, session="main", token=ALICE, timeout=30, **kw):
        self.all, self.taken, self.deadline = [], [], None
        super().__init__(gw, kernel, token, session=session, timeout=timeout, **kw)

    def ask(self, kind, content=None, channel="shell", buffers=(), **extra):
        return self.submit(wire.request(kind, content, self.session, channel, **extra), buffers)

    def execute(self, code, **content):
        return self.submit(wire.execute(code, self.session, **content))

    def message(self):
        self.taken.clear()
        m = super().message()
        m["at"] = time.monotonic()
        self.all.append(m)
        return m

    def until(self, condition):
        """The next message that fulfils it."""
        while not condition(m := self.message()):
            pass
        return m

    def done(self, *requests):
        """Read until each request has its reply and its idle; everything with these parents."""
        owed = {(r, what) for r in requests for what in ("reply", "idle")}
        for m in self.all:
            owed -= self.pays(m)
        while owed:
            owed -= self.pays(self.message())
        return self.of(*requests)

    @staticmethod
    def pays(m):
        parent = m["parent_header"].get("msg_id")
        if m["channel"] in ("shell", "control") and m["msg_type"].endswith("_reply"):
            return {(parent, "reply")}
        return {(parent, "idle")} if state(m) == "idle" else set()

    def of(self, *requests):
        return [m for m in self.all if m["parent_header"].get("msg_id") in requests]

    def run(self, code, **content):
        return self.done(self.execute(code, **content))

    def value(self, code):
        """text/plain of the cell's result."""
        out = self.run(code)
        values = [m["content"]["data"]["text/plain"] for m in out if m["msg_type"] == "execute_result"]
        assert len(values) == 1, out
        return values[0]

    def _read(self, n):
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left <= 0 and len(self.rx) < n:
                raise TimeoutError
            self.s.settimeout(max(left, 0.001))
        data = super()._read(n)
        self.taken.append(data)
        return data

    def during(self, seconds):
        """What comes within this time. Half a message at its end stays for the next read."""
        out, usual = [], self.s.gettimeout()
        self.deadline = time.monotonic() + seconds
        try:
            while True:
                out.append(self.message())
        except TimeoutError:
            self.rx = b"".join(self.taken) + self.rx
        finally:
            self.deadline = None
            self.s.settimeout(usual)
        return out


def state(m):
    return m["content"]["execution_state"] if m["msg_type"] == "status" else None


def states(messages):
    return [s for m in messages if (s := state(m))]


def types(messages):
    return [m["msg_type"] for m in messages]


def reply(messages, request=None):
    """Content of the one reply."""
    found = [m for m in messages if m["channel"] in ("shell", "control") and m["msg_type"].endswith("_reply") and
             (request is None or m["parent_header"]["msg_id"] == request)]
    assert len(found) == 1, found
    return found[0]["content"]


def check_end(messages):
    """Busy first, idle last, in between the rest; one reply."""
    assert states(messages) == ["busy", "idle"]
    iopub = [m for m in messages if m["channel"] == "iopub"]
    assert state(iopub[0]) == "busy" and state(iopub[-1]) == "idle"
    return reply(messages)


def stdout(messages):
    return wire.text_of(messages)


def stderr(messages):
    return wire.text_of(messages, "stderr")


def data(messages):
    """Data of the rich outputs, in order."""
    return [m["content"]["data"] for m in messages
            if m["msg_type"] in ("display_data", "execute_result", "update_display_data")]


def result_text(result):
    """stdout of a REST execution."""
    return "".join(o["text"] for o in result["outputs"] if o["output_type"] == "stream" and o["name"] == "stdout")


@contextlib.contextmanager
def within(seconds, what="this"):
    """A bound of a case."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < seconds * SLACK, f"{what} took {took:.1f} s"


def state_files(gw):
    """Everything that the server has written below its state directory."""
    for path in pathlib.Path(gw.state).rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def strict(text):
    """JSON without the tokens that only Python takes."""
    def refuse(token):
        raise ValueError(token)
    return json.loads(text, parse_constant=refuse)
