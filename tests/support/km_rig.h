#pragma once
/* Rig for tests of kernelmgr/: manager over fake sandboxes on a virtual loop, and clients that
 * write down what they get. Callbacks only record; tests assert afterwards. */
#include "kernelmgr/km.h"
#include "tests/support/fake_vm.h"

struct rig {
    struct loop *loop;
    struct fake_service vms;
    struct km_config cfg;
    struct km_manager *m;
    struct metrics *metrics; /* NULL unless the test makes them; freed by rig_fini */
    bool closed;
};
struct rig_done { /* a km_done_fn that remembers */
    unsigned calls;
    struct km_kernel *k;
    struct err e;
};
struct rig_client {
    struct km_client c; /* first */
    struct jp_msg **got;
    size_t n_got, room;
    unsigned wakes, throttles_on, throttles_off, closes;
    enum km_close_why why;
    char why_text[300];
    const char *eager; /* content of a request that it sends whenever it may again */
    bool lazy;         /* does not pull when woken */
};

void rig_init(struct rig *r);
void rig_start_manager(struct rig *r); /* with r->cfg */
void rig_fini(struct rig *r);
void rig_turn(struct rig *r); /* run what is deferred */
void rig_advance(struct rig *r, uint64_t ms);
void rig_on_done(void *ctx, struct km_kernel *k, const struct err *e);
/* Start a kernel of principal "me" and bring it to ready. */
struct km_kernel *rig_kernel(struct rig *r, struct fake_vm **ret_vm);

int rig_attach(struct rig_client *c, struct km_kernel *k, const char *session);
void rig_client_fini(struct rig_client *c);
void rig_pull(struct rig_client *c);   /* everything there is */
void rig_forget(struct rig_client *c); /* what was got so far */
int rig_submit(struct rig_client *c, enum jp_channel ch, const char *type, const char *id,
               const char *content);
/* How many messages of this type (NULL: any) and parent (NULL: any) came; the last of them into
 * *ret_last. */
size_t rig_count(const struct rig_client *c, const char *type, const char *parent,
                 const struct jp_msg **ret_last);
/* "status:busy stream execute_reply ..." of everything got for this parent (NULL: all). Caller
 * frees. */
char *rig_story(const struct rig_client *c, const char *parent);
bool rig_content_has(const struct jp_msg *m, const char *text);
const char *rig_state(const struct km_kernel *k);
