#include "common/sm.h"
#include "common/buf.h"
#include "common/log.h"
#include <assert.h>
#include <stdlib.h>

void sm_init(struct sm *m, const struct sm_def *def, unsigned initial)
{
    assert(def->n_states <= 64 && initial < def->n_states);
    m->def = def;
    m->state = initial;
}

bool sm_can(const struct sm *m, unsigned to)
{
    return to < m->def->n_states && (m->def->states[m->state].next & SM_TO(to));
}

void sm_move(struct sm *m, unsigned to)
{
    if (to == m->state)
        return;
    if (!sm_can(m, to)) {
        log_error(NULL, "illegal move of state machine %s: %s -> %s", m->def->name, sm_name(m),
                  to < m->def->n_states ? m->def->states[to].name : "(no such state)");
        abort();
    }
    m->state = to;
}

const char *sm_name(const struct sm *m)
{
    return m->def->states[m->state].name;
}

char *sm_describe(const struct sm_def *def)
{
    struct buf b;
    buf_init(&b, 65536);
    int r = 0;
    for (unsigned i = 0; i < def->n_states && r == 0; i++) {
        r = buf_printf(&b, "%s ->", def->states[i].name);
        const char *sep = " ";
        for (unsigned k = 0; k < def->n_states && r == 0; k++) {
            if (!(def->states[i].next & SM_TO(k)))
                continue;
            r = buf_printf(&b, "%s%s", sep, def->states[k].name);
            sep = ", ";
        }
        if (r == 0)
            r = buf_append_str(&b, def->states[i].next ? "\n" : " (end)\n");
    }
    char *text = r == 0 ? (char *)buf_steal(&b, NULL) : NULL;
    buf_fini(&b);
    if (!text)
        abort(); /* 64 states of sane names always fit */
    return text;
}
