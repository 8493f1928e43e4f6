#pragma once
/* A backend whose machines are a gl_link at the other end of a socketpair, on the test's own loop,
 * and misbehave on demand. */
#include "common/list.h"
#include "vm/backend.h"

enum fake_mode {
    FAKE_OK,
    FAKE_SPAWN_FAILS,   /* spawn returns an error */
    FAKE_NEVER_SPAWNED, /* spawned() does not come */
    FAKE_DIES_SPAWNING,
    FAKE_DIES_LOADING,
    FAKE_SILENT,      /* no HELLO */
    FAKE_DEAF_ONCE,   /* forgets the first HELLO */
    FAKE_SILENT_ONCE, /* this machine says nothing, the next one does */
    FAKE_OLD_VERSION,
    FAKE_NO_KERNEL, /* HELLO lists none */
    FAKE_RESUME_REFUSED,
    FAKE_RESUME_UNPROVEN, /* ok, but no word of the steps */
    FAKE_RESUME_HANGS,
    FAKE_ASSIGN_REFUSED,
    FAKE_GARBAGE, /* bytes that are no frames */
    FAKE_TWO_HELLOS,
    FAKE_ASSIGNED_EARLY, /* answers ASSIGN before it was asked */
    FAKE_LINK_CLOSES,    /* after HELLO; the process stays */
};

struct fake_machine;
struct fake_world {
    struct vm_backend base; /* first */
    struct loop *loop;
    enum fake_mode mode; /* of machines spawned from now on */
    unsigned spawned, alive, background, max_alive;
    unsigned resumes, assigns, prepares, shutdowns;
    json_t *resume, *assign, *prepare; /* the last ones */
    struct list machines;
    int next_pid;
};
void fake_world_init(struct fake_world *w, struct loop *l);
void fake_world_fini(struct fake_world *w);

/* The oldest living machine. */
struct fake_machine *fake_first(struct fake_world *w);
void fake_die(struct fake_machine *m, const char *text); /* as if its process was killed */
/* Bytes or a frame from the guest. */
void fake_write(struct fake_machine *m, const void *bytes, size_t n);
void fake_send(struct fake_machine *m, enum gl_type type, uint32_t stream, const char *text);
unsigned fake_received(const struct fake_machine *m, enum gl_type type);
