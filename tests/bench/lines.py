"""The measurements. Each takes a Bench and adds rows; limits are those of the work item."""
import subprocess
import sys
import time

import servers
import stats

IPYKERNEL = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
IMPORTS = "import pandas, matplotlib.pyplot"


def ms(values):
    return stats.summary([v / 1000 for v in values])


def bar(figures, limit):
    return {"limit": limit, "met": figures["p50"] <= limit}


def cold(b):
    """Snapshot start without a pool."""
    n = b.n(40, 5)
    ready, created, result, stages = [], [], [], {"spawn_ms": [], "load_ms": [], "resume_ms": [], "assign_ms": []}
    with b.tcg("cold", 0) as server:
        for i in range(n + 1):
            servers.settled(server, 0)
            got = b.drive("start", server.url, server.token, "", "1+1")
            if i == 0:
                continue  # the template's memory is being loaded
            times = got["model"]["cellvisor"]["timings"]
            ready.append(times["total_ms"] - times["queue_ms"])
            created.append(got["created_us"])
            result.append(got["result_us"])
            for key, found in stages.items():
                found.append(times[key])
    figures = stats.summary(ready)
    b.row("cold", "snapshot start without pool: VMM spawn to kernel ready", "ms", figures, **bar(figures, 150),
          stages={k: round(stats.summary(v)["p50"], 2) for k, v in stages.items()})
    b.row("cold", "the same, POST /api/kernels to 201", "ms", ms(created))
    b.row("cold", "the same, POST to the result of 1+1", "ms", ms(result))


def pooled(b):
    """Start from a full pool beside jupyter_kernel_gateway, in turn."""
    n = b.n(40, 5)
    created, result, peer_created, peer_result, peer_ready = [], [], [], [], []
    with b.tcg("pooled", 2) as server, b.peer("peer-pooled") as peer:
        for _ in range(n):
            servers.settled(server, 2)
            got = b.drive("start", server.url, server.token, "", "1+1")
            origin = got["model"]["cellvisor"]["timings"]["origin"]
            if origin != "parked":
                raise RuntimeError(f"the start came from {origin}")
            created.append(got["created_us"])
            result.append(got["result_us"])
            servers.settled(server, 2)
            got = b.drive("start", peer.url, peer.token, "python3", "1+1")
            peer_created.append(got["created_us"])
            peer_result.append(got["result_us"])
        for _ in range(b.n(10, 2)):
            servers.settled(server, 2)
            got = b.drive("start", peer.url, peer.token, "python3", IMPORTS + "\\n1+1")
            peer_ready.append(got["result_us"])
    figures = ms(created)
    b.row("pooled", "pooled start: POST /api/kernels to 201", "ms", figures, **bar(figures, 10))
    b.row("pooled", "jupyter_kernel_gateway: POST to 201 (its kernel is not ready then)", "ms", ms(peer_created))
    figures, other = ms(result), ms(peer_result)
    b.row("pooled", "pooled start: POST to the result of 1+1", "ms", figures, **bar(figures, 150))
    b.row("pooled", "jupyter_kernel_gateway with ipykernel: POST to the result of 1+1", "ms", other)
    ratio = round(other["p50"] / figures["p50"], 2)
    b.row("pooled", "how many times faster than jupyter_kernel_gateway", "x", ratio, limit=5, met=ratio >= 5,
          at_least=True)
    b.row("pooled", "jupyter_kernel_gateway: the same with pandas and matplotlib imported (ours are already)", "ms",
          ms(peer_ready))


def start_kernel(server, spec):
    import json
    return json.loads(servers.get(server, "api/kernels", "POST", json.dumps({"name": spec}).encode()))["id"]


def compare(b, spec, argv, code, n, warmup, rounds, echo):
    """{what: samples in ms}. Ours and the direct ones in turn; then jupyter_kernel_gateway, whose 40 ms waits
    would put the processors to sleep before each of the others' cells; then all but it with pauses. Fresh
    kernels each round."""
    total = {}

    def drive(names, targets, count, pause):
        got = b.drive("cells", count, warmup, pause, code, *targets)
        for name, samples in zip(names, got["targets"]):
            total.setdefault(name, []).extend(v / 1000 for v in samples)

    with b.local(f"cells-{spec}", echo=echo) as server, b.peer(f"peer-cells-{spec}", echo=echo) as peer:
        for r in range(rounds):
            ids = [start_kernel(s, spec) for s in (server, peer)]
            own, other = (f"{s.url},{s.token},{i}" for s, i in zip((server, peer), ids))
            with b.kernel(f"{spec}-{r}-ipc", argv, "ipc") as ipc, b.kernel(f"{spec}-{r}-tcp", argv, "tcp") as tcp:
                targets = [f"ws:{own}", f"zmq:{ipc}", f"zmq:{tcp}"]
                servers.quiet()
                drive(("ours", "ipc", "tcp"), targets, n, 0)
                drive(("ours paused", "ipc paused", "tcp paused"), targets, n // 5, 20)
            drive(("peer", "peer quick"), [f"ws:{other}", f"wsq:{other}"], n // 5, 0)
            for s, i in zip((server, peer), ids):
                servers.get(s, f"api/kernels/{i}", "DELETE")
    return total


def above(b, name, what, samples, direct, **limit):
    """A row with the difference of medians to the faster of the direct ones."""
    best = min(direct, key=lambda d: stats.summary(d)["p50"])
    diff = stats.difference(samples, best)
    more = {"limit": limit["limit"], "met": diff["value"] <= limit["limit"]} if limit else {}
    b.row("cells", f"{name}: {what}", "ms", diff["value"], interval=[diff["low"], diff["high"]], **more)


def cells(b):
    """Cell round trip: websocket on the local backend against the same kernel over direct ZMQ."""
    jobs = [("python3", IPYKERNEL, "1+1", b.n(500, 50), 100, b.n(4, 1), False, "ipykernel"),
            ("echo", [str(b.bin / "cv-echo-kernel"), "{connection_file}"], "echo 2", b.n(2000, 200), 200,
             b.n(2, 1), True, "C echo kernel")]
    rows = (("ours", "cell round trip, Cellvisor websocket"), ("ipc", "direct ZMQ, ipc"), ("tcp", "direct ZMQ, tcp"),
            ("peer", "jupyter_kernel_gateway websocket"), ("peer quick", "the same, client acknowledges at once"))
    for spec, argv, code, n, warmup, rounds, echo, name in jobs:
        got = compare(b, spec, argv, code, n, warmup, rounds, echo)
        for key, what in rows:
            b.row("cells", f"{name}: {what}", "ms", stats.summary(got[key]))
        direct, paused = (got["ipc"], got["tcp"]), (got["ipc paused"], got["tcp paused"])
        above(b, name, "Cellvisor above the faster direct one", got["ours"], direct, limit=0.3)
        above(b, name, "the same with a pause of 20 ms before each cell", got["ours paused"], paused)
        above(b, name, "jupyter_kernel_gateway above it, client acknowledges at once", got["peer quick"], direct)


def rss(pid):
    m = servers.memory(pid)
    return round(m["VmRSS"], 1), {"rss_anon": round(m["RssAnon"], 1), "rss_file": round(m["RssFile"], 1),
                                  "pss": round(m["Pss"], 1)}


def attached(b, server, n):
    """Memory with n echo kernels, a websocket on each and one cell done."""
    argv = [str(b.bin / "cv-bench"), "attach", server.url, server.token, "echo", str(n), "echo 2"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proc:
        if not proc.stdout.readline():
            raise RuntimeError("cv-bench attach failed")
        time.sleep(2)
        found = rss(server.proc.pid)
        proc.stdin.close()
    return found


def memory(b):
    """Resident memory of the gateway process."""
    n = 50
    for name, start, limits in (("cellvisor", b.local, (15, 40)), ("jupyter_kernel_gateway", b.peer, (None, None))):
        with start(f"memory-{name}", echo=True) as server:
            servers.get(server, "api/kernelspecs")
            time.sleep(2)
            idle, parts = rss(server.proc.pid)
            b.row("memory", f"{name}: VmRSS idle", "MB", idle, **limited(idle, limits[0]), parts=parts)
            many, parts = attached(b, server, n)
            b.row("memory", f"{name}: VmRSS with {n} kernels attached", "MB", many, **limited(many, limits[1]),
                  parts=parts)
    with b.tcg("memory-tcg", 2) as server:
        servers.settled(server, 2)
        idle, parts = rss(server.proc.pid)
        b.row("memory", "cellvisor: VmRSS with the template loaded and 2 sandboxes parked", "MB", idle,
              **limited(idle, 15), parts=parts)


def limited(value, limit):
    return {"limit": limit, "met": value <= limit} if limit else {}


FRAME = "import pandas as pd, numpy as np\\ndf = pd.DataFrame({'a': np.arange(1000.), 'b': np.random.rand(1000)})"
PLOT = ("import matplotlib\\nmatplotlib.use('module://matplotlib_inline.backend_inline')\\n"
        "import matplotlib.pyplot as plt\\nplt.plot(df['a'], df['b'])\\nplt.show()")
LOOP = "sum(i*i for i in range(10**6))"


def guest(b):
    """What a user's first cells cost in a fresh VM, and what the VM costs the host."""
    names = ("1+1", "load a dataframe", "df.describe()", "plot", "1+1 again", "a second plot",
             "a loop of a million steps")
    code = ";;".join(("1+1", FRAME, "df.describe()", PLOT, "1+1", PLOT, LOOP))
    times = [[] for _ in names]
    parked, used = [], []
    with b.tcg("guest", 1) as server:
        for _ in range(b.n(10, 2)):
            servers.settled(server, 1)
            parked.extend(servers.memory(p) for p in servers.pid_of_machine(server))
            machine = servers.pid_of_machine(server)[0]
            kernel = start_kernel(server, "")
            servers.wait_for(lambda: servers.vms(server).get("parked") == 1, "a parked sandbox")
            got = b.drive("once", code, f"ws:{server.url},{server.token},{kernel}")
            used.append(servers.memory(machine))
            servers.get(server, f"api/kernels/{kernel}", "DELETE")
            for found, cell in zip(times, got["cells"]):
                if not cell["ok"]:
                    raise RuntimeError("a cell failed in the guest")
                found.append(cell["done_us"])
    for name, found in zip(names, times):
        b.row("guest", f"microVM (TCG), fresh: {name}", "ms", ms(found))
    for what, found in (("parked", parked), ("after those cells", used)):
        b.row("guest", f"VMM memory {what}: written by this machine alone", "MB",
              stats.summary([m["Anonymous"] for m in found]))
        b.row("guest", f"VMM memory {what}: resident, with the template's shared pages", "MB",
              stats.summary([m["Rss"] for m in found]))


def flood(b):
    """How fast output comes through: 64 MB of stream text from the echo kernel."""
    size = b.n(64, 8) * 10**6
    for name, start in (("cellvisor", b.local), ("jupyter_kernel_gateway", b.peer)):
        rates = []
        with start(f"flood-{name}", echo=True) as server:
            kernel = start_kernel(server, "echo")
            for _ in range(b.n(5, 2)):
                got = b.drive("once", f"flood {size}", f"ws:{server.url},{server.token},{kernel}")["cells"][0]
                if got["stream_bytes"] < size:
                    raise RuntimeError(f"{name}: {got['stream_bytes']} of {size} bytes came")
                rates.append(got["stream_bytes"] / got["done_us"])
        b.row("flood", f"{name}: stream output of 1000-byte messages", "MB/s", stats.summary(rates))


LINES = {"cold": cold, "pooled": pooled, "cells": cells, "memory": memory, "guest": guest, "flood": flood}
