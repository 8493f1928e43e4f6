#pragma once
/* What a test needs to use real sandboxes: a host with a loop, sandboxes, and code run in their
 * kernels. */
#include "vm/host.h"

struct client_host {
    struct loop *loop;
    struct metrics *metrics;
    struct vm_host *host;
    int closed;
};
/* Template to use: $CELLVISOR_VM_TEMPLATE, else "python", else "minimal", whichever is built and
 * loads here; NULL and a text on stderr when none. state_dir: $CELLVISOR_STATE or the default. */
const char *client_template(char *state_dir, size_t size);
int client_open(struct client_host *h, const struct vm_host_config *c, struct err *e);
/* Ends all VMs, frees the host; false when something was left after ten seconds. */
bool client_close(struct client_host *h);

struct client_vm {
    struct client_host *h;
    struct vm *vm; /* NULL after down */
    int up, down;
    uint64_t down_us;
    struct vm_exit why;
    /* the cell that runs */
    char msg_id[64];
    bool replied, idle;
    int pngs;        /* image/png outputs */
    struct buf text; /* stdout, results as text, "ERROR name: value" */
};
/* 0 or what vm_acquire says; then wait. */
int client_start(struct client_host *h, struct client_vm *v, const char *template_name,
                 struct err *e);
bool client_wait_up(struct client_vm *v, uint64_t ms);
bool client_wait_down(struct client_vm *v, uint64_t ms);
/* Start a cell / wait until reply and idle. Text in v->text (NUL-terminated). */
int client_send(struct client_vm *v, const char *code);
bool client_wait_cell(struct client_vm *v, uint64_t ms);
const char *client_run(struct client_vm *v, const char *code); /* both; NULL: not answered */
void client_end(struct client_vm *v, unsigned grace_ms); /* release, wait, free what it holds */
