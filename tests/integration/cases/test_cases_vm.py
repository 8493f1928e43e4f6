"""Section P, cases 150 and 151: what clones of one snapshot must not share. Needs a built template (python or
minimal) in the state directory; skipped without one. TCG."""
import ast
import json
import os
import subprocess
import time

import launch
import pytest
from casekit import ALICE, BOB, Client
from gateway_conftest import Gateway

CLONES = 4


def ready_template():
    done = subprocess.run([launch.cellvisor(), "template", "list", "--json"], capture_output=True, text=True, timeout=60)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return None
    names = [t["name"] for t in found if t.get("state") == "ready"]
    return next((n for n in ("python", "minimal") if n in names), None)


@pytest.fixture(scope="module")
def vms(tmp_path_factory):
    if not os.environ.get("CV_TEST_VM"):
        pytest.skip("cases in microVMs: set CV_TEST_VM=1 (scripts/test --stage vm does)")
    template = ready_template()
    assert template, "no template is built: cellvisor template build python"
    server = launch.gateway(tmp_path_factory.mktemp("vms") / "server.log", "--accel", "tcg", "--template-only", template,
                            "--token", f"alice:{ALICE}", "--token", f"bob:{BOB}", "--start-timeout", "120")
    gw = Gateway(server, None)
    yield gw
    try:
        gw.drop_kernels()
        gw.session.close()
    finally:
        server.stop(0)


def start(gw):
    r = gw.post("/api/kernels", {}, timeout=150)
    assert r.status_code == 201, r.text
    return r.json()["id"]


def test_case_150_clones_share_no_random_number(vms):
    """4 of the 8 clones."""
    code = ("import random,uuid,os,secrets\nvalues=[random.random(),str(uuid.uuid4()),os.urandom(8).hex(),"
            "secrets.token_hex(8),open('/proc/sys/kernel/random/boot_id').read(),os.uname().nodename]\n"
            "try:\n    import numpy;values.append(float(numpy.random.rand()))\nexcept ImportError: pass\nvalues")
    seen, sessions = [], set()
    for _ in range(CLONES):
        with Client(vms, start(vms), timeout=120) as ws:
            seen.append(ast.literal_eval(ws.value(code)))
            sessions |= {m["header"]["session"] for m in ws.all if m["msg_type"] == "execute_reply"}
    for column in zip(*seen):
        assert len(set(column)) == CLONES, column
    assert len(sessions) == CLONES


def test_case_151_the_clock_is_the_hosts(vms):
    with Client(vms, start(vms), timeout=120) as ws:
        before = time.time()
        guest = float(ws.value("import time;time.time()"))
        after = time.time()
    assert before - 0.5 < guest < after + 0.5
