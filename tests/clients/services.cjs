// @jupyterlab/services under Node against a server: node services.cjs URL TOKEN legacy|v1 [spec]
// The library of JupyterLab itself: REST models, kernel websockets in both framings, comms with buffers,
// reconnect with replay, interrupt, restart, input. Each step prints a line; the first failure ends it.
'use strict';
const assert = require('node:assert/strict');
const WebSocketImpl = require('ws');
const services = require('@jupyterlab/services');

const [baseUrl, token, framing, spec = ''] = process.argv.slice(2);
const V1 = 'v1.kernel.websocket.jupyter.org';
const sockets = []; // every socket opened, newest last

class Socket extends WebSocketImpl {
  constructor(url, protocols) {
    // Without an offered subprotocol the server must speak the legacy framing.
    if (framing === 'legacy') {
      super(url);
    } else {
      super(url, protocols);
    }
    sockets.push(this);
  }
}

const serverSettings = services.ServerConnection.makeSettings({
  baseUrl,
  wsUrl: baseUrl.replace(/^http/, 'ws'),
  token,
  appendToken: true,
  WebSocket: Socket,
  fetch: globalThis.fetch,
  Headers: globalThis.Headers,
  Request: globalThis.Request
});

const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));

/** Wait for a condition, checked often, with a deadline that names what was missing. */
async function until(what, condition, ms = 60000) {
  const end = Date.now() + ms;
  while (!(await condition())) {
    if (Date.now() > end) {
      throw new Error(`not within ${ms} ms: ${what}`);
    }
    await sleep(20);
  }
}

/** Run code and collect what it produced. */
async function run(kernel, code, options = {}) {
  const future = kernel.requestExecute({ code, allow_stdin: Boolean(options.onStdin) });
  const seen = { messages: [], text: '', status: [] };
  future.onIOPub = message => {
    seen.messages.push(message);
    if (message.header.msg_type === 'stream') {
      seen.text += message.content.text;
      options.onStream?.(seen.text);
    }
    if (message.header.msg_type === 'status') {
      seen.status.push(message.content.execution_state);
    }
  };
  if (options.onStdin) {
    future.onStdin = options.onStdin;
  }
  if (options.started) {
    await options.started(seen, future);
  }
  seen.reply = await future.done;
  return seen;
}

function newestSocket() {
  return sockets[sockets.length - 1];
}

const steps = {
  async 'kernelspecs are listed with a default'({ specs }) {
    await specs.ready;
    assert.ok(specs.specs.default in specs.specs.kernelspecs);
    const one = specs.specs.kernelspecs[specs.specs.default];
    assert.ok(one.display_name && one.language);
  },

  async 'a kernel starts, connects and says what it is'(context) {
    context.kernel = await context.kernels.startNew({ name: spec || undefined });
    await until('connected', () => context.kernel.connectionStatus === 'connected');
    const info = await context.kernel.info;
    assert.equal(info.language_info.name, 'python');
    assert.equal(newestSocket().protocol, framing === 'v1' ? V1 : '');
  },

  async 'output arrives in order between busy and idle'({ kernel }) {
    const seen = await run(kernel, 'for i in range(100): print(i)\n6 * 7');
    assert.equal(seen.reply.content.status, 'ok');
    assert.deepEqual(seen.text.trim().split('\n').map(Number), [...Array(100).keys()]);
    const result = seen.messages.find(m => m.header.msg_type === 'execute_result');
    assert.equal(result.content.data['text/plain'], '42');
    assert.deepEqual([seen.status[0], seen.status.at(-1)], ['busy', 'idle']);
  },

  async 'errors come as message and as reply'({ kernel }) {
    const seen = await run(kernel, 'raise KeyError("k")');
    assert.equal(seen.reply.content.status, 'error');
    assert.equal(seen.reply.content.ename, 'KeyError');
    assert.ok(seen.messages.some(m => m.header.msg_type === 'error'));
  },

  async 'completion and inspection are answered'({ kernel }) {
    const complete = await kernel.requestComplete({ code: 'pri', cursor_pos: 3 });
    assert.ok(complete.content.matches.includes('print'));
    const inspect = await kernel.requestInspect({ code: 'print', cursor_pos: 5, detail_level: 0 });
    assert.equal(inspect.content.found, true);
  },

  async 'a comm echoes a binary buffer'({ kernel }) {
    await run(kernel, [
      'def _opened(comm, message):',
      '    @comm.on_msg',
      '    def _(m):',
      '        comm.send({"n": len(m["buffers"])}, buffers=[bytes(m["buffers"][0])[::-1], b""])',
      'get_ipython().kernel.comm_manager.register_target("echo", _opened)'
    ].join('\n'));
    const bytes = Uint8Array.from({ length: 70001 }, (_, i) => (i * 7) & 255);
    const comm = kernel.createComm('echo');
    const echoed = new Promise(resolve => {
      comm.onMsg = resolve;
    });
    await comm.open({}).done;
    await comm.send({ hello: 1 }, {}, [bytes]).done;
    const message = await echoed;
    assert.equal(message.content.data.n, 1);
    assert.equal(message.buffers.length, 2);
    const back = Buffer.from(message.buffers[0].buffer ?? message.buffers[0],
      message.buffers[0].byteOffset ?? 0, message.buffers[0].byteLength);
    assert.ok(back.equals(Buffer.from(bytes).reverse()), 'the buffer came back changed');
    assert.equal(message.buffers[1].byteLength, 0);
    await comm.close().done;
  },

  async 'an ipywidgets image takes and echoes a binary state'({ kernel }) {
    const probe = await run(kernel, 'try:\n    import ipywidgets\n    print("yes")\nexcept ImportError:\n    print("no")');
    if (probe.text.trim() === 'no') {
      return 'ipywidgets is not in this kernel';
    }
    let model = null;
    const updates = [];
    kernel.registerCommTarget('jupyter.widget', (comm, open) => {
      if (open.content.data.state._model_name === 'ImageModel') {
        model = { comm, open };
        comm.onMsg = m => {
          updates.push(m);
        };
      }
    });
    await run(kernel, 'w = ipywidgets.Image(value=b"\\x00\\x01\\xff" * 5)');
    await until('comm of the widget', () => model);
    assert.equal(model.open.buffers[0].byteLength, 15);
    const value = Uint8Array.from([9, 0, 255, 128]);
    await model.comm.send({ method: 'update', state: {}, buffer_paths: [['value']] }, {}, [value]).done;
    await until('echo of the update', () => updates.some(m => m.content.data.method === 'echo_update'));
    const seen = await run(kernel, 'print(list(w.value))');
    assert.equal(seen.text.trim(), '[9, 0, 255, 128]');
    return undefined;
  },

  async 'input() is asked and answered'({ kernel }) {
    const seen = await run(kernel, 'print("hello", input("who? "))', {
      onStdin: message => {
        assert.equal(message.content.prompt, 'who? ');
        kernel.sendInputReply({ status: 'ok', value: 'Ada' }, message.header);
      }
    });
    assert.match(seen.text, /hello Ada/);
  },

  async 'a lost connection comes back and misses nothing'({ kernel }) {
    const code = 'import time\nfor i in range(60):\n    print(i, flush=True)\n    time.sleep(0.05)';
    // Cut right behind a line: what this process has received but not read would die with its own socket.
    let cut = false;
    const seen = await run(kernel, code, {
      onStream: text => {
        if (!cut && text.endsWith('5\n')) {
          cut = true;
          newestSocket().terminate();
        }
      },
      started: () => until('second connection', () => cut && kernel.connectionStatus === 'connected' &&
        newestSocket().readyState === 1)
    });
    assert.deepEqual(seen.text.trim().split('\n').map(Number), [...Array(60).keys()]);
    assert.equal(seen.reply.content.status, 'ok');
  },

  async 'interrupt ends an endless loop'({ kernel }) {
    const seen = await run(kernel, 'print("in")\nwhile True: pass', {
      started: async live => {
        await until('loop entered', () => live.text.includes('in'));
        await kernel.interrupt();
      }
    });
    assert.equal(seen.reply.content.ename, 'KeyboardInterrupt');
  },

  async 'restart keeps the id and forgets the state'({ kernel }) {
    await run(kernel, 'kept = 1');
    const id = kernel.id;
    await kernel.restart();
    await until('connected again', () => kernel.connectionStatus === 'connected');
    const seen = await run(kernel, 'print("kept" in globals())');
    assert.equal(kernel.id, id);
    assert.equal(seen.text.trim(), 'False');
    assert.equal(seen.reply.content.execution_count, 1);
  },

  async 'a second client sees the same kernel'({ kernel, kernels }) {
    const other = kernels.connectTo({ model: kernel.model });
    await until('second client connected', () => other.connectionStatus === 'connected');
    await run(kernel, 'shared = 5');
    const seen = await run(other, 'print(shared)');
    assert.equal(seen.text.trim(), '5');
    other.dispose();
  },

  async 'sessions are made, renamed and ended'({ sessions }) {
    const session = await sessions.startNew({ name: 'a', path: 'dir/a.ipynb', type: 'notebook',
      kernel: { name: spec || undefined } });
    await session.setName('b');
    await session.setPath('dir/b.ipynb');
    const models = await services.SessionAPI.listRunning(serverSettings);
    const model = models.find(m => m.id === session.id);
    assert.deepEqual([model.name, model.path], ['b', 'dir/b.ipynb']);
    await session.shutdown();
    const left = await services.SessionAPI.listRunning(serverSettings);
    assert.ok(!left.some(m => m.id === session.id));
  },

  async 'shutdown removes the kernel'({ kernel }) {
    const { id } = kernel;
    await kernel.shutdown();
    const models = await services.KernelAPI.listRunning(serverSettings);
    assert.ok(!models.some(m => m.id === id));
  }
};

async function main() {
  const kernels = new services.KernelManager({ serverSettings, standby: 'never' });
  const context = {
    kernels,
    specs: new services.KernelSpecManager({ serverSettings, standby: 'never' }),
    sessions: new services.SessionManager({ serverSettings, kernelManager: kernels, standby: 'never' })
  };
  await kernels.ready;
  const only = process.env.ONLY;
  for (const [name, step] of Object.entries(steps)) {
    if (only && !name.includes(only) && !name.startsWith('a kernel starts')) {
      continue;
    }
    const start = Date.now();
    const note = await step(context);
    console.log(`ok   ${name} (${Date.now() - start} ms)${note ? ` - skipped: ${note}` : ''}`);
  }
}

main().then(
  () => process.exit(0),
  error => {
    console.log('FAIL', error);
    process.exit(1);
  }
);
