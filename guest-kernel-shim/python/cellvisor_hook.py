"""Cellvisor's hook inside a Python kernel: an IPython extension that the shim adds to ipykernel's
command line (--IPKernelApp.extra_extensions=cellvisor_hook). Plain kernels work without it.

One daemon thread waits on inherited descriptors: a socket for commands of the shim
(CELLVISOR_HOOK_FD; one JSON line each way, see guest-kernel-shim/hook.h) and the pipes behind
descriptors 1 and 2 (CELLVISOR_OUT_FDS), whose bytes become stream output of the running cell. The
shim holds the same pipes and takes what is left in them when the process dies.

Start-up under emulation is twenty times slower than on metal: import nothing that ipykernel has
not already imported. Private attributes of ipykernel are used only behind getattr, so that another
version loses a feature and not its life.
"""

import codecs
import json
import os
import select
import signal
import sys
import threading
import time

LAST_WORDS = 0.02  # seconds that output stays in the pipes, where it survives a crash of the process


class Hook:
    def __init__(self, shell, command_fd, out_fds):
        self.shell = shell
        self.kernel = shell.kernel
        self.fd = command_fd
        self.lock = threading.Lock()
        self.pipes = {}  # descriptor -> (decoder, stream)
        self.waiting = select.poll()
        self.writers = {}  # stream -> its own write method
        self.last_writer = None
        os.set_inheritable(command_fd, False)
        for fd in out_fds:
            os.set_inheritable(fd, False)
        self.streams = [sys.stdout, sys.stderr]
        self.capture = False
        self.before = ""
        if len(out_fds) == 2 and all(hasattr(s, "pub_thread") for s in self.streams):
            self.capture_descriptors(out_fds)
            for stream in self.streams:
                self.keep_order(stream)
            os.register_at_fork(after_in_child=self.after_fork)
        self.wake_fd = None
        self.wake_on_signals()
        self.never_drop()
        self.pack_anything()
        self.inline_figures()

    # ---- output ----

    def capture_descriptors(self, out_fds):
        """Take over from ipykernel's own watcher threads, which tear characters that arrive in
        two reads and lose what they hold when the process dies."""
        for number, (stream, fd) in enumerate(zip(self.streams, out_fds), start=1):
            copy = getattr(stream, "_original_stdstream_copy", None)
            if copy is not None:
                os.dup2(copy, number)  # back to the shim's pipe; the watcher never wakes again
                stream._should_watch = False  # else close() would wait for the watcher
            else:
                stream.fileno = lambda number=number: number
            stream.echo = None  # would come back as a second copy
            stream.flush_timeout = 3600  # a slow reader makes the cell wait; it is not an error
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self.pipes[fd] = (decoder, stream)
            self.waiting.register(fd, select.POLLIN)
        self.capture = True
        self.before = self.take_rest()
        # What a cell's children wrote must be out before the cell's reply.
        self.shell.events.register("post_execute", self.drain)

    def take_rest(self):
        """What was written before the kernel is ready belongs to no cell: the shim keeps it."""
        data = b""
        for fd in self.pipes:
            try:
                data += os.read(fd, 65536)
            except OSError:
                pass
        return data.decode("utf-8", "replace")

    def drain(self):
        with self.lock:
            for fd, (decoder, stream) in self.pipes.items():
                for _ in range(64):
                    try:
                        data = os.read(fd, 65536)
                    except OSError:
                        break
                    if not data:
                        break
                    text = decoder.decode(data)
                    if text:
                        self.put(stream, text)

    def flush_soon(self):
        for stream in self.streams:
            if getattr(stream, "_flush_pending", False):
                stream.pub_thread.schedule(stream._flush)

    def put(self, stream, text):
        """Text written to one stream goes out before later text of the other."""
        if self.last_writer is not stream:
            other, self.last_writer = self.last_writer, stream
            if other is not None and getattr(other, "_flush_pending", False):
                other.flush()
        return self.writers[stream](text)

    def keep_order(self, stream):
        """print() after os.system(): what the child wrote comes first."""
        waiting = self.waiting.poll
        self.writers[stream] = stream.write

        def write(text):
            if self.pipes and waiting(0):
                self.drain()
            return self.put(stream, text)

        stream.write = write

    def wake_on_signals(self):
        """An interrupt of an await: ipykernel's handler queues a callback, but tornado, asked from the
        loop's own thread, does not wake the loop, which sleeps on until the next event. Signals also
        reach our thread, which asks from outside."""
        try:
            self.wake_fd, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        except Exception as error:
            self.complain("signals do not wake the loop", error)

    def woken(self):
        try:
            os.read(self.wake_fd, 4096)
            self.kernel.io_loop.add_callback(lambda: None)
        except Exception as error:
            self.complain("the loop was not woken", error)

    def after_fork(self):
        """In the child of a fork() in a cell: it must not come back into the kernel's loop, whose
        sockets it shares. It may finish its cell, then it ends."""
        self.pipes = {}  # the parent's; and its lock may be held by a thread that is not here
        signal.set_wakeup_fd(-1)
        self.shell.events.register("post_execute", self.leave)

    def leave(self):
        for stream in self.streams:
            try:
                stream.flush()
            except Exception:
                pass
        os._exit(0)

    def never_drop(self):
        """A publisher at its high-water mark drops silently: make it wait instead."""
        try:
            import zmq

            thread = self.kernel.iopub_thread
            socket = thread.socket

            def set_option():
                try:
                    socket.setsockopt(zmq.XPUB_NODROP, 1)
                except Exception:
                    socket.setsockopt(zmq.SNDHWM, 0)

            thread.schedule(set_option)
        except Exception as error:
            self.complain("iopub keeps its high-water mark", error)

    def pack_anything(self):
        """Lone surrogates (undecodable file names) must not lose a message, and numbers that JSON
        does not have become null, without a warning in the cell's stderr."""
        session = self.kernel.session
        pack = session.pack
        try:
            from jupyter_client.jsonutil import json_default
        except ImportError:
            json_default = str

        def strict(obj):
            text = json.dumps(obj, default=json_default, ensure_ascii=False, allow_nan=False)
            return text.encode("utf-8")

        def safe_pack(obj):
            try:
                if getattr(pack, "__name__", "") == "json_packer":
                    return strict(obj)
                data = pack(obj)
                if isinstance(data, str):
                    data = data.encode("utf-8")
                if not data.isascii():
                    data.decode("utf-8")
                return data
            except (TypeError, ValueError):  # UnicodeError is one
                return strict(plain(obj))

        try:
            session.pack = safe_pack
        except Exception as error:
            self.complain("surrogates stay as they are", error)

    def inline_figures(self):
        """Figures show without a magic, also when pyplot is first imported inside a style context
        (whose exit would restore the setting that the import made)."""
        if os.environ.get("MPLBACKEND", "").startswith("module://") or not os.environ.get("MPLBACKEND"):
            sys.meta_path.insert(0, PyplotFinder())

    # ---- commands ----

    def start(self):
        self.send({"hook": 1, "capture": self.capture, "before": self.before})
        thread = threading.Thread(target=self.run, name="cellvisor-hook", daemon=True)
        thread.pydev_do_not_trace = True
        thread.is_pydev_daemon_thread = True
        thread.start()

    def run(self):
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        for fd in self.pipes:
            poll.register(fd, select.POLLIN)
        if self.wake_fd is not None:
            poll.register(self.wake_fd, select.POLLIN)
        pid = os.getpid()
        pending = b""
        for stream in self.streams:
            # ipykernel ties a thread's output to the cell that started it; ours is everybody's.
            for table in ("_thread_to_parent_header", "_thread_to_parent"):
                getattr(stream, table, {}).pop(threading.get_ident(), None)
        while os.getpid() == pid:
            ready = dict(poll.poll())
            if any(fd in ready for fd in self.pipes):
                try:
                    time.sleep(LAST_WORDS)
                    self.drain()
                    self.flush_soon()
                except Exception as error:
                    self.complain("output of descriptors 1 and 2", error)
            for fd in self.pipes:
                if ready.get(fd, 0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    poll.unregister(fd)
            if self.wake_fd in ready:
                self.woken()
            if self.fd in ready:
                data = os.read(self.fd, 65536)
                if not data:
                    return  # the shim is gone
                if not pending and self.resume(data):
                    continue
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self.send(self.answer(line))

    def resume(self, data):
        """The one command that every start waits for, {"reseed":S,"rekey":{"session":S,"key":S}} on
        a line of its own, without json and without traitlets: under emulation what Python code
        runs for the first time in a clone is translated then, and this is a third of it."""
        part = data.split(b'"')
        if len(part) != 15 or part[1] != b"reseed" or part[7] != b"session" or part[14] != b"}}\n":
            return False
        try:
            reseed(bytes.fromhex(part[3].decode()))
            session, key = part[9].decode(), part[13]
            values, own = self.kernel.session._trait_values, self.kernel._trait_values
            if not ("session" in values and "bsession" in values and "auth" in values and "ident" in own):
                return False  # another version: the long way
            values["auth"] = type(values["auth"])(key, digestmod=values["digest_mod"])
            values["key"], values["bsession"], values["session"] = key, part[9], session
            own["ident"] = session
        except Exception:
            return False
        os.write(self.fd, b'{"ok": true}\n')
        return True

    def send(self, obj):
        data = json.dumps(obj).encode("ascii") + b"\n"
        while data:
            data = data[os.write(self.fd, data) :]

    def answer(self, line):
        try:
            command = json.loads(line)
            for name in ("reseed", "rekey", "env", "cwd", "gc"):
                if command.get(name) is not None:
                    getattr(self, "do_" + name)(command[name])
            return {"ok": True}
        except BaseException as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def do_reseed(self, entropy):
        reseed(bytes.fromhex(entropy))

    def do_rekey(self, new):
        session = self.kernel.session
        session.session = new["session"]
        session.key = new["key"].encode("ascii")
        self.kernel.ident = new["session"]
        path = new.get("file")
        if path:
            with open(path, "r+") as file:
                info = json.load(file)
                info["key"] = new["key"]
                file.seek(0)
                json.dump(info, file, indent=2)
                file.truncate()

    def do_env(self, env):
        os.environ.update(env)

    def do_cwd(self, path):
        os.chdir(path)

    def do_gc(self, _):
        import gc

        gc.collect()
        gc.freeze()  # collections of the clones leave these pages alone

    def complain(self, what, error):
        try:
            print(f"cellvisor_hook: {what}: {error!r}", file=sys.__stderr__, flush=True)
        except Exception:
            pass


def replace_surrogates(text):
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain(obj):
    """A copy that JSON can say: no lone surrogates, no NaN or infinity, keys that are strings."""
    if isinstance(obj, str):
        return replace_surrogates(obj)
    if isinstance(obj, float):
        return obj if obj - obj == 0 else None
    if isinstance(obj, dict):
        return {plain(k if isinstance(k, str) else str(k)): plain(v) for k, v in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [plain(v) for v in obj]
    return obj


def reseed(seed):
    """New state for every generator that was seeded before the snapshot. What draws from the
    operating system (secrets, uuid4, os.urandom) needs nothing: the guest's kernel was reseeded."""
    modules = sys.modules
    if "random" in modules:
        modules["random"].seed(int.from_bytes(seed, "little"))  # bytes would be hashed first
    if "numpy.random" in modules:
        seed_numpy(modules["numpy.random"])
    if "ssl" in modules:
        modules["ssl"].RAND_add(seed, float(len(seed)))
    if "tempfile" in modules:
        modules["tempfile"]._name_sequence = None
    if "uuid" in modules:
        modules["uuid"]._node = None
        modules["uuid"]._last_timestamp = None
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "torch" in modules:
        modules["torch"].manual_seed(int.from_bytes(seed[:8], "little") >> 1)


def seed_numpy(module):
    """The whole state at once: seed() with an array walks through a tenth of numpy for it."""
    try:
        module.set_state(("MT19937", memoryview(os.urandom(2496)).cast("I"), 624, 0, 0.0))
    except Exception:  # another default generator, another version
        module.seed([int.from_bytes(os.urandom(4), "little") for _ in range(16)])


class PyplotFinder:
    """Notices the first import of matplotlib.pyplot, then removes itself."""

    def find_spec(self, name, path=None, target=None):
        if name != "matplotlib.pyplot":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                choose_inline(module)

            spec.loader.exec_module = exec_module
        return spec


def choose_inline(pyplot):
    """Resolve the backend now, and make it what style contexts restore."""
    try:
        pyplot.get_backend() if hasattr(pyplot, "get_backend") else None
        pyplot.switch_backend(pyplot.rcParams["backend"])
        from matplotlib_inline.config import InlineBackend  # noqa: F401 (its import registers)
    except Exception:
        pass  # the user's first figure reports what is wrong


def load_ipython_extension(shell):
    command_fd = os.environ.pop("CELLVISOR_HOOK_FD", None)
    out_fds = os.environ.pop("CELLVISOR_OUT_FDS", "")
    if os.environ.pop("CELLVISOR_HOOK_MODE", "") == "vm":
        lazy_history(shell)
    forget_path(os.path.dirname(os.path.abspath(__file__)))
    if command_fd is None or getattr(shell, "kernel", None) is None:
        return
    Hook(shell, int(command_fd), [int(fd) for fd in out_fds.split(",") if fd]).start()


def lazy_history(shell):
    """Under emulation SQLite costs a fifth of a short cell. Readers of the history write the cache
    out first, and a guest's history ends with the guest."""
    try:
        shell.history_manager.db_cache_size = 1000
    except Exception:
        pass


def forget_path(folder):
    """The shim's folder was on PYTHONPATH for this import only."""
    sys.path[:] = [p for p in sys.path if p != folder]
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != folder]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
