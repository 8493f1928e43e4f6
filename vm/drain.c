#include "vm/drain.h"
#include <errno.h>
#include <string.h>
#include <unistd.h>

#define CHUNK 8192u

void vm_tail_add(struct vm_tail *t, struct slice s)
{
    size_t keep;

    if (s.n > VM_TAIL_MAX)
        s = slice_of(s.p + (s.n - VM_TAIL_MAX), VM_TAIL_MAX);
    keep = t->n + s.n > VM_TAIL_MAX ? VM_TAIL_MAX - s.n : t->n;
    memmove(t->bytes, t->bytes + (t->n - keep), keep);
    if (s.n)
        memcpy(t->bytes + keep, s.p, s.n);
    t->n = keep + s.n;
    t->bytes[t->n] = '\0';
}

void vm_tail_last_line(const struct vm_tail *t, char *ret, size_t size)
{
    size_t end = t->n, start, n = 0;

    while (end > 0 && (unsigned char)t->bytes[end - 1] <= ' ')
        end--;
    for (start = end; start > 0 && t->bytes[start - 1] != '\n';)
        start--;
    for (; start < end && n + 1 < size; start++) {
        char c = t->bytes[start];

        ret[n++] = (unsigned char)c < ' ' || c == 0x7f ? ' ' : c;
    }
    ret[n] = '\0';
}

static ssize_t take(struct vm_drain *d)
{
    uint8_t chunk[CHUNK];
    ssize_t n = read(d->fd, chunk, sizeof(chunk));

    if (n <= 0)
        return n;
    vm_tail_add(&d->tail, slice_of(chunk, (size_t)n));
    if (d->log_fd >= 0 && d->logged < d->log_max) {
        size_t room = d->log_max - d->logged;
        ssize_t w = write(d->log_fd, chunk, (size_t)n < room ? (size_t)n : room);

        d->logged += w > 0 ? (size_t)w : room; /* disk full: stop trying */
    }
    return n;
}

static void on_readable(void *ctx, int events)
{
    struct vm_drain *d = ctx;
    ssize_t n = take(d);

    (void)events;
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        vm_drain_stop(d);
        return;
    }
    if (!loop_timer_active(d->timer)) {
        d->burst = 0;
        loop_timer_start(d->timer, VM_DRAIN_PAUSE_MS, 0);
    }
    d->burst += (size_t)n;
    if (d->burst >= VM_DRAIN_BURST)
        loop_fd_set(d->watch, 0);
}

static void on_timer(void *ctx)
{
    struct vm_drain *d = ctx;

    d->burst = 0;
    loop_fd_set(d->watch, LOOP_READ);
}

void vm_drain_start(struct vm_drain *d, struct loop *l, int fd, int log_fd, size_t log_max)
{
    d->fd = fd;
    d->log_fd = log_fd;
    d->log_max = log_max;
    d->timer = loop_timer_new(l, on_timer, d);
    d->watch = loop_fd_new(l, fd, on_readable, d);
    loop_fd_set(d->watch, LOOP_READ);
}

void vm_drain_finish(struct vm_drain *d)
{
    for (int i = 0; i < 16 && d->fd >= 0 && take(d) > 0; i++)
        ;
}

void vm_drain_stop(struct vm_drain *d)
{
    loop_fd_free(d->watch);
    d->watch = NULL;
    loop_timer_free(d->timer);
    d->timer = NULL;
    if (d->fd >= 0)
        close(d->fd);
    if (d->log_fd >= 0)
        close(d->log_fd);
    d->fd = d->log_fd = -1;
}
