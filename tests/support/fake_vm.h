#pragma once
/* A vm_service for tests of kernelmgr/: sandboxes that do what the test tells them, and remember
 * what they were sent. Keeps the contract of vm/vm.h: callbacks never come from inside a call,
 * down() exactly once and last, guest bytes only within the credit window. */
#include "common/list.h"
#include "common/loop.h"
#include "proto/jp_msg.h"
#include "vm/vm.h"

struct fake_frame {
    struct list_node link; /* fake_vm::sent */
    enum gl_type type;
    uint32_t stream;
    struct jp_msg *msg; /* GL_KERNEL_MSG */
    char *text;         /* the JSON of all others */
};
struct fake_vm {
    struct vm vm; /* first */
    struct fake_service *service;
    struct list_node link; /* fake_service::vms */
    const struct vm_events *ev;
    void *ctx;
    struct list sent;
    size_t n_sent;
    bool is_up, released, is_down, down_queued;
    struct vm_exit exit;
    uint32_t stream;     /* what the guest says is said on: 1, or that of the last start */
    size_t window;       /* payload bytes the guest may still send */
    size_t sent_credits; /* ever sent, for the check that all are given back */
    size_t granted;
    int send_error; /* what sends of messages give, 0 = nothing */
    unsigned room;  /* not 0: so many messages are taken, then it is full */
    int ctl_error;  /* what sends of GL_KERNEL_CTL and _START give, 0 = nothing */
    bool full;      /* sends give -EAGAIN */
    size_t queued;  /* what vm_queued says */
    unsigned closed_streams;
    char template_name[40], spec[40];
    json_t *env;
};
struct fake_service {
    struct vm_service service; /* first */
    struct loop *loop;
    struct list vms; /* all that are not down, oldest first */
    struct vm_template_desc templates[3];
    size_t n_templates;
    json_t *specs[3];
    int acquire_error; /* next acquires fail with it */
    bool prestarted;   /* VMs bring the kernel "python3" on stream 1 */
    unsigned acquired, alive;
};

/* Offers template "python" with python3 and bash, and "minimal" with python3. */
void fake_service_init(struct fake_service *s, struct loop *l);
void fake_service_fini(struct fake_service *s);
struct fake_vm *fake_vm_last(struct fake_service *s); /* NULL: none alive */

void fake_vm_up(struct fake_vm *v);
/* Ends it: down() runs at the next step of the loop... */
void fake_vm_down(struct fake_vm *v, enum vm_exit_reason why, const char *text);
/* Next frame the manager sent, oldest first, skipping none; NULL: none. Free with fake_frame_free.
 */
struct fake_frame *fake_vm_take(struct fake_vm *v);
/* Next GL_KERNEL_MSG, dropping other frames before it. */
struct jp_msg *fake_vm_take_msg(struct fake_vm *v);
/* Next GL_KERNEL_CTL: its op into op[16]; id, or 0 when there is none. */
uint64_t fake_vm_take_ctl(struct fake_vm *v, char op[16]);
void fake_frame_free(struct fake_frame *f);

/* What the guest sends. -ENOSPC: no credit for it. parent may be NULL. */
int fake_vm_say(struct fake_vm *v, enum jp_channel ch, const char *type,
                const struct jp_msg *parent, const char *content);
int fake_vm_raw(struct fake_vm *v, enum gl_type type, uint32_t stream, struct slice payload);
void fake_vm_state(struct fake_vm *v, const char *json);
void fake_vm_done(struct fake_vm *v, uint64_t id, bool ok);
/* busy, reply {"status":"ok"...}, idle for a request: what a good kernel does. */
void fake_vm_serve(struct fake_vm *v, const struct jp_msg *request);

/* A message as a client would send it. */
struct jp_msg *fake_request(enum jp_channel ch, const char *type, const char *session,
                            const char *msg_id, const char *content);
