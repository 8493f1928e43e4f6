/* A VMM that its guest has taken over, talking QMP to us. The first byte says how many commands
 * wait before its bytes come; every 0x00 in the input lets time pass. Whatever it says: no crash,
 * closed() at most once and last, and every command is answered at most once. */
#include "vm/qmp.h"
#include <assert.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct vm_qmp *qmp;
static unsigned n_closed, n_replies, n_sent;

static void on_reply(void *ctx, json_t *result, const struct err *e)
{
    (void)ctx;
    assert((result != NULL) != (e != NULL));
    assert(n_closed == 0);
    n_replies++;
}

static void on_ready(void *ctx)
{
    unsigned n = *(unsigned *)ctx;

    for (unsigned i = 0; i < n; i++)
        n_sent += vm_qmp_command(qmp, "cont", NULL, -1, 100, on_reply, NULL) == 0;
    n_sent += vm_qmp_command(qmp, "query-status", NULL, -1, 100, NULL, NULL) == 0;
}

static void on_event(void *ctx, const char *name, json_t *data)
{
    (void)ctx;
    assert(name && n_closed == 0);
    assert(!data || json_typeof(data) >= JSON_OBJECT);
}

static void on_closed(void *ctx, const struct err *e)
{
    (void)ctx;
    assert(e->code < 0 && e->msg[0]);
    n_closed++;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct vm_qmp_events events = { on_ready, on_event, on_closed };
    struct loop *loop = loop_new_virtual();
    unsigned commands = size ? data[0] % 40 : 0;

    n_closed = n_replies = n_sent = 0;
    qmp = vm_qmp_new(loop, -1, 1000, NULL, &events, &commands);
    for (size_t i = size ? 1 : 0; i < size;) {
        const uint8_t *nul = memchr(data + i, 0, size - i);
        size_t n = nul ? (size_t)(nul - (data + i)) : size - i;

        vm_qmp_feed(qmp, slice_of(data + i, n));
        i += n;
        if (nul) {
            loop_virtual_advance(loop, 60);
            i++;
        }
    }
    assert(n_closed <= 1 && n_replies <= n_sent);
    vm_qmp_free(qmp);
    loop_free(loop);
    return 0;
}
