/* The sandboxes: a kernel that takes requests in order, says numbered outputs, replies, and now and
 * then dies. */
#include "tests/sim/sim.h"
#include <errno.h>
#include <string.h>

uint64_t *sim_numbers(struct sim *s, const char *kernel_id)
{
    uint64_t *n = map_get(s->numbers, kernel_id);
    if (!n) {
        n = xnew(uint64_t);
        map_put(s->numbers, kernel_id, n);
    }
    return n;
}

static struct km_kernel *kernel_of(struct fake_vm *v)
{
    return ((struct km_box *)v->ctx)->kernel;
}

static void queue_clear(struct sim_guest *g)
{
    for (size_t i = 0; i < g->n_queue; i++)
        jp_msg_unref(g->queue[i]);
    g->n_queue = 0;
    g->busy = false;
}

static void queue_pop(struct sim_guest *g)
{
    jp_msg_unref(g->queue[0]);
    g->n_queue--;
    memmove(g->queue, g->queue + 1, g->n_queue * sizeof(*g->queue));
    g->busy = false;
}

static void report(struct sim_guest *g, const char *json)
{
    fake_vm_raw(g->vm, GL_KERNEL_STATE, g->stream, slice_str(json));
}

static void on_ctl(struct sim_guest *g, const char *text)
{
    json_t *o = json_loads(text, 0, NULL);
    const char *op = json_string_value(json_object_get(o, "op"));
    uint64_t id = (uint64_t)json_integer_value(json_object_get(o, "id"));
    if (!strcmp(op, "interrupt")) {
        fake_vm_done(g->vm, id, g->state == G_RUNNING);
        if (g->state == G_RUNNING)
            g->outputs_left = 0;
    } else if (!strcmp(op, "restart")) {
        g->restart_id = id;
    }
    json_decref(o);
}

static void take_frames(struct sim *s, struct sim_guest *g)
{
    struct fake_frame *f;
    while (g->n_queue < 256 && (f = fake_vm_take(g->vm))) {
        if (f->type == GL_KERNEL_START) {
            g->state = G_STARTING;
            g->stream = f->stream;
        } else if (f->type == GL_KERNEL_CTL) {
            if (f->stream == g->stream)
                on_ctl(g, f->text);
        } else if (f->type == GL_KERNEL_MSG) {
            SIM_CHECK(s, f->msg != NULL, "a body that cannot be decoded was sent");
            if (g->state == G_RUNNING && f->msg->parts.channel != JP_STDIN)
                g->queue[g->n_queue++] = jp_msg_ref(f->msg);
        }
        fake_frame_free(f);
        if (g->vm->down_queued)
            return;
    }
}

/* Something with a number in it, so that clients can tell order and holes. */
static bool say_number(struct sim *s, struct sim_guest *g, const struct jp_msg *parent)
{
    struct km_kernel *k = kernel_of(g->vm);
    static char content[150200];
    if (!k)
        return false;
    uint64_t *n = sim_numbers(s, k->id);
    unsigned long long v = *n + 1;
    bool stream = sim_chance(&s->rng, 70);
    size_t pad =
        sim_chance(&s->rng, s->mood == SIM_FLOOD ? 15 : 2) ? 150000 : sim_below(&s->rng, 300);
    int at = stream ? snprintf(content, 100, "{\"name\": \"stdout\", \"text\": \"#%llu;", v)
                    : snprintf(content, 100, "{\"data\": {\"text/plain\": \"#%llu;", v);
    memset(content + at, '.', pad);
    snprintf(content + (size_t)at + pad, 100, stream ? "\"}" : "\"}, \"metadata\": {}}");
    if (fake_vm_say(g->vm, JP_IOPUB, stream ? "stream" : "display_data", parent, content) < 0)
        return false;
    *n = v;
    s->said++;
    return true;
}

static bool say_status(struct sim_guest *g, const struct jp_msg *parent, const char *status)
{
    char content[64];
    snprintf(content, sizeof(content), "{\"execution_state\": \"%s\"}", status);
    return fake_vm_say(g->vm, JP_IOPUB, "status", parent, content) == 0;
}

/* One step of the request at the head of the queue. */
static void work(struct sim *s, struct sim_guest *g)
{
    struct jp_msg *q = g->queue[0];
    char reply[JP_ID_MAX];
    if (!g->busy) {
        g->busy = say_status(g, q, "busy");
        g->outputs_left = strcmp(q->msg_type, "execute_request")
                              ? 0
                              : sim_below(&s->rng, s->mood == SIM_FLOOD ? 150 : 12);
        return;
    }
    if (g->outputs_left) {
        g->outputs_left -= say_number(s, g, q);
        if (sim_chance(&s->rng, 2))
            fake_vm_say(g->vm, JP_STDIN, "input_request", q, "{\"prompt\": \"?\"}");
        return;
    }
    if (g->vm->window < 4096)
        return; /* reply and idle together, or not yet */
    struct sim_req *asked = map_get(s->by_id, q->msg_id);
    if (sim_chance(&s->rng, 1) && asked)
        asked->lost = true;
    else if (jp_reply_type(q->msg_type, reply))
        fake_vm_say(g->vm, q->parts.channel, reply, q, "{\"status\": \"ok\"}");
    /* A reply or an idle may get lost, not both: then nobody could tell the request from a long
     * one. */
    if ((asked && asked->lost) || !sim_chance(&s->rng, 1))
        say_status(g, q, "idle");
    queue_pop(g);
}

static void guest_turn(struct sim *s, struct sim_guest *g)
{
    take_frames(s, g);
    if (g->vm->down_queued || !kernel_of(g->vm))
        return;
    if (g->restart_id && sim_chance(&s->rng, 50)) {
        g->restart_id = 0;
        queue_clear(g);
        g->state = G_STARTING;
        report(g, "{\"state\":\"starting\"}");
        return;
    }
    if (g->state == G_STARTING && sim_chance(&s->rng, 50)) {
        if (sim_chance(&s->rng, 5)) {
            report(g, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"start_failed\"}");
            g->state = G_GONE;
            return;
        }
        g->state = G_RUNNING;
        report(g, "{\"state\":\"running\",\"info\":{\"status\":\"ok\"}}");
        return;
    }
    if (g->state != G_RUNNING)
        return;
    for (unsigned i = sim_below(&s->rng, s->mood == SIM_CALM ? 8 : 60);
         i && g->n_queue && !g->vm->down_queued; i--)
        work(s, g);
    if (sim_chance(&s->rng, 5))
        say_number(s, g, NULL); /* a thread of an old cell */
}

static void adopt(struct sim *s)
{
    /* Guests of sandboxes that are gone leave; new sandboxes get one. */
    for (size_t i = 0; i < s->n_guests; i++) {
        bool alive = false;
        LIST_FOR_EACH (&s->vms.vms, n)
            alive |= list_entry(n, struct fake_vm, link) == s->guests[i].vm;
        if (alive)
            continue;
        queue_clear(&s->guests[i]);
        s->guests[i--] = s->guests[--s->n_guests];
    }
    LIST_FOR_EACH (&s->vms.vms, n) {
        struct fake_vm *v = list_entry(n, struct fake_vm, link);
        bool known = false;
        for (size_t i = 0; i < s->n_guests; i++)
            known |= s->guests[i].vm == v;
        if (known)
            continue;
        SIM_CHECK(s, s->n_guests < 64, "too many sandboxes: %zu", s->n_guests);
        s->guests[s->n_guests++] = (struct sim_guest) { .vm = v, .stream = 1 };
    }
}

void sim_guests_turn(struct sim *s)
{
    adopt(s);
    for (size_t i = 0; i < s->n_guests; i++) {
        struct sim_guest *g = &s->guests[i];
        struct fake_vm *v = g->vm;
        if (v->down_queued)
            continue;
        if (!v->is_up) {
            if (sim_chance(&s->rng, 3)) {
                fake_vm_down(v, VM_EXIT_START_FAILED, "would not");
            } else if (sim_chance(&s->rng, 50)) {
                if (v->vm.info.kernel_stream)
                    g->state = G_RUNNING;
                fake_vm_up(v);
            }
            continue;
        }
        if (sim_chance(&s->rng, 4))
            v->full = !v->full;
        if (!v->full && sim_chance(&s->rng, 50))
            v->ev->writable(v->ctx, g->stream);
        guest_turn(s, g);
    }
}

static struct sim_guest *pick(struct sim *s)
{
    adopt(s);
    if (!s->n_guests)
        return NULL;
    struct sim_guest *g = &s->guests[sim_below(&s->rng, (unsigned)s->n_guests)];
    return g->vm->down_queued ? NULL : g;
}

void sim_guest_kill(struct sim *s)
{
    struct sim_guest *g = pick(s);
    if (!g || !g->vm->is_up || g->state != G_RUNNING)
        return;
    s->deaths++;
    queue_clear(g);
    g->state = G_GONE;
    report(g, sim_chance(&s->rng, 50) ? "{\"state\":\"exited\",\"exit_code\":7,\"reason\":\"exit\"}"
                                      : "{\"state\":\"exited\",\"signal\":9,\"reason\":\"oom\"}");
}

void sim_guest_crash(struct sim *s)
{
    struct sim_guest *g = pick(s);
    if (!g)
        return;
    s->deaths++;
    fake_vm_down(g->vm, VM_EXIT_VMM, "killed by SIGKILL");
}

void sim_guests_finish(struct sim *s)
{
    for (int turn = 0; turn < 3000; turn++) {
        sim_guests_turn(s);
        for (size_t i = 0; i < s->n_guests; i++)
            s->guests[i].vm->full = false;
        for (size_t i = 0; i < SIM_CLIENTS; i++)
            if (s->clients[i].attached)
                sim_client_pull(s, &s->clients[i], 1000);
        loop_virtual_advance(s->loop, 1);
    }
}

void sim_guests_free(struct sim *s)
{
    for (size_t i = 0; i < s->n_guests; i++)
        queue_clear(&s->guests[i]);
    s->n_guests = 0;
}
