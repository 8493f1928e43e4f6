/* execution_state and last_activity of the REST model, by an observer of our own (jupyter.md 2.5):
 * requests that tools send by themselves (kernel_info, comm_info, debug ...) neither make a kernel
 * busy nor keep it alive. Two points go beyond Jupyter's rule, both to keep the state true: an idle
 * on the control channel does not end the busy of a cell, and neither does the idle of one subshell
 * while another still runs. */
#include "kernelmgr/km_priv.h"
#include <string.h>

void km_state_set(struct km_kernel *k, const char *state)
{
    snprintf(k->execution_state, sizeof(k->execution_state), "%s", state);
}

static bool tracked(const char *type)
{
    return !*type || !jp_type_untracked(type);
}

void km_state_observe(struct km_kernel *k, const struct jp_msg *m, const struct km_req *q,
                      const char *status)
{
    bool parent_tracked = tracked(m->parent_type);
    /* Before it is ready and when it is gone, the life of the kernel sets the state (kernel.c). */
    if (*status && km_state(k) == KM_K_READY && strcmp(status, "starting") != 0) {
        bool idle = !strcmp(status, "idle");
        bool other_runs = idle && k->router.n_busy > (q && q->busy && q->tracked ? 1u : 0u);
        bool aside = idle && q && q->channel == JP_CONTROL && !strcmp(k->execution_state, "busy");
        if (parent_tracked && !other_runs && !aside)
            km_state_set(k, status);
    }
    if (tracked(m->msg_type) || parent_tracked || !strcmp(k->execution_state, "busy"))
        k->last_activity_us = loop_wall_us(k->m->loop);
}
