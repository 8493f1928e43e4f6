"""Start and stop, TLS, ports."""
import concurrent.futures
import signal
import socket
import subprocess
import time

import pytest
import requests
import urllib3
import wire
from conftest import ALICE, stop

urllib3.disable_warnings()


def test_a_stop_answers_what_is_in_flight_and_closes_websockets_with_1012(start):
    g = start()
    k = g.kernel()
    ws = wire.Kernel(g, k, ALICE)
    ws.run("echo 1")
    idle = wire.connect(g)
    half = wire.connect(g)
    half.sendall(b"GET /api HTT")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(g.post, f"/api/kernels/{k}/execute", {"code": "print early\nsleep 1200\necho late"})
        wire.wait_for(lambda: g.model(k)["execution_state"] == "busy")
        g.server.proc.send_signal(signal.SIGTERM)
        r = job.result(20)
    assert r.status_code == 200 and r.json()["status"] == "ok", r.text
    assert ws.close_code() == 1012
    assert wire.closed(idle) and wire.closed(half)
    g.server.proc.wait(30)  # a second signal would end it at once
    stop(g)


def test_a_stop_does_not_wait_for_ever(start):
    g = start()
    k = g.kernel()
    ws = wire.Kernel(g, k, ALICE, rcvbuf=4096)  # never reads, never answers
    ws.submit(wire.execute("flood 3000000"))
    body = b'{"code":"sleep 600000"}'
    s = wire.connect(g)
    s.sendall(b"POST /api/kernels/%s/execute HTTP/1.1\r\nHost: localhost\r\nAuthorization: token %s\r\n"
              b"Content-Length: %d\r\n\r\n" % (k.encode(), ALICE.encode(), len(body)) + body)
    time.sleep(0.5)
    begin = time.monotonic()
    g.server.proc.send_signal(signal.SIGTERM)
    g.server.proc.wait(30)
    stop(g)
    assert time.monotonic() - begin < 25
    s.close()


def test_new_connections_are_refused_while_stopping(start):
    g = start()
    k = g.kernel()
    s = wire.connect(g)
    s.sendall(b"GET /api HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert wire.read_response(s)[0] == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(g.post, f"/api/kernels/{k}/execute", {"code": "sleep 1000"})
        wire.wait_for(lambda: g.model(k)["execution_state"] == "busy")
        g.server.proc.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(OSError):
            wire.connect(g, 2)
        assert job.result(20).status_code == 200
    g.server.proc.wait(30)
    stop(g)


def test_shutdown_by_api(start):
    g = start(tokens=(f"alice:{ALICE}",))
    assert g.post("/api/shutdown").status_code == 200
    g.server.proc.wait(20)
    stop(g)


def test_shutdown_is_not_for_everybody(gw):
    r = gw.post("/api/shutdown")
    assert r.status_code == 403 and "alice" in r.json()["message"]
    assert gw.get("/api").status_code == 200


def test_a_taken_port_is_named(start, gw):
    port = gw.url.rsplit(":", 1)[1]
    with pytest.raises(AssertionError) as e:
        start("--port", port)
    assert "is taken" in str(e.value) and port in str(e.value)


def test_following_ports_are_tried(start, gw):
    port = int(gw.url.rsplit(":", 1)[1])
    g = start("--port", str(port), "--port-retries", "20")
    assert port < int(g.url.rsplit(":", 1)[1]) <= port + 20
    stop(g)


def test_ipv6(start):
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    g = start("--ip", "::1")
    assert g.url.startswith("http://[::1]:")
    assert g.get("/api").status_code == 200
    k = g.kernel()
    with wire.Kernel(g, k, ALICE) as ws:
        assert ws.run("echo 1")
    stop(g)


# ---- TLS ----

@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    d = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", d / "key.pem", "-out", d / "cert.pem", "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", d / "other.pem"], check=True,
                   capture_output=True)
    return d


def test_everything_works_over_tls(start, pem):
    g = start("--tls-cert", str(pem / "cert.pem"), "--tls-key", str(pem / "key.pem"))
    assert g.url.startswith("https://")
    r = requests.get(g.url + "/api", verify=str(pem / "cert.pem"), timeout=10)
    assert r.status_code == 200
    assert "Secure" in g.get(f"/login?token={ALICE}", token=None).headers["Set-Cookie"]
    k = g.kernel()
    assert g.run(k, "echo 1")["status"] == "ok"
    big = b"z" * 3_000_000
    for v1 in (False, True):
        with wire.Kernel(g, k, ALICE, v1=v1, session=f"t{v1}", timeout=60) as ws:
            assert ws.status == 101
            ws.submit(wire.request("comm_open", {"comm_id": "c", "target_name": "t", "data": {}}), [big])
            while (m := ws.message())["msg_type"] != "comm_msg":
                pass
            assert m["buffers"] == [big]
            assert wire.text_of(ws.run("lines 2000")) == "".join(f"line {i}\n" for i in range(2000))
    r = g.run(k, "flood 2000000")
    assert len("".join(o["text"] for o in r["outputs"])) >= 2000000
    with wire.connect(g) as s:  # h2 is not offered
        assert s.selected_alpn_protocol() in (None, "http/1.1")
    plain = socket.create_connection(("127.0.0.1", int(g.url.rsplit(":", 1)[1])), timeout=10)
    plain.sendall(b"GET /api HTTP/1.1\r\n\r\n")
    assert wire.closed(plain)
    # a client that leaves is noticed through TLS, too
    body = b'{"code":"sleep 60000"}'
    with wire.connect(g) as s:
        s.sendall(b"POST /api/kernels/%s/execute HTTP/1.1\r\nHost: localhost\r\nAuthorization: token %s\r\n"
                  b"Content-Length: %d\r\n\r\n" % (k.encode(), ALICE.encode(), len(body)) + body)
        wire.wait_for(lambda: g.model(k)["execution_state"] == "busy")
    wire.wait_for(lambda: g.model(k)["execution_state"] == "idle", what="interrupted")
    stop(g)


def test_wrong_certificates_are_explained(start, pem):
    (pem / "junk.pem").write_text("junk")
    for cert, key, word in (("cert.pem", "other.pem", "other.pem"), ("junk.pem", "key.pem", "junk.pem"),
                            ("nope.pem", "key.pem", "nope.pem"), ("cert.pem", "junk.pem", "junk.pem")):
        with pytest.raises(AssertionError) as e:
            start("--tls-cert", str(pem / cert), "--tls-key", str(pem / key))
        assert word in str(e.value)


@pytest.mark.parametrize("options,word", [
    (["--ws-ping", "30000"], "ping"), (["--ws-ping", "60", "--ws-pong-timeout", "60"], "pong"),
    (["--ip", "nonsense"], "nonsense"), (["--base-url", "/a?b"], "base"), (["--port", "70000"], "port"),
])
def test_bad_options_are_explained(start, options, word):
    with pytest.raises(AssertionError) as e:
        start(*options)
    assert word in str(e.value)
