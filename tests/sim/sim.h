#pragma once
/* A storm over kernelmgr/: random clients, kernels, deaths and restarts, all drawn from one seed,
 * with invariants that are checked as it goes. sim_guest.c plays the sandboxes, sim_client.c the
 * clients, sim_storm.c throws the dice. */
#include "kernelmgr/km_priv.h"
#include "tests/support/fake_vm.h"

#define SIM_CLIENTS 10u
#define SIM_SESSIONS 14u
#define SIM_KERNELS 6u
#define SIM_REQS_MAX 30000u
#define SIM_MOOD_STEPS 400u

struct sim_rng {
    uint64_t s;
};
uint64_t sim_next(struct sim_rng *r);
unsigned sim_below(struct sim_rng *r, unsigned n); /* 0 .. n-1 */
bool sim_chance(struct sim_rng *r, unsigned percent);

/* What was asked, and what came back. */
struct sim_req {
    char id[24];
    char kernel[40];
    unsigned session;
    enum jp_channel channel;
    bool wants_reply, refused;
    bool lost; /* its guest swallowed the reply: ours comes late */
    unsigned replies, idles;
    uint64_t order;
};

/* One session of one kernel as its client believes it: reset when the kernel has another id. */
struct sim_session {
    char name[8];
    char kernel[40];  /* "" = never attached */
    uint64_t number;  /* last numbered output seen, 0 = none */
    uint64_t from;    /* first one that may be seen */
    uint64_t allowed; /* messages announced as missing, not yet used up */
    uint64_t order;   /* of the last shell reply */
    uint64_t left_ms; /* when it was detached */
    bool attached;
    bool behind; /* was away and has not caught up: only then may it be told of losses */
};
struct sim_client {
    struct km_client c; /* first */
    struct sim *sim;
    unsigned session;
    bool attached, lazy, throttled;
};

/* The weather changes every SIM_MOOD_STEPS steps. */
enum sim_mood {
    SIM_CALM,
    SIM_FLOOD /* much output, slow readers */,
    SIM_PILE /* many requests at once */
};

struct sim_guest { /* plays the kernel in one sandbox */
    struct fake_vm *vm;
    enum { G_NEW, G_STARTING, G_RUNNING, G_GONE } state;
    struct jp_msg *queue[256];
    size_t n_queue;
    bool busy; /* queue[0] runs */
    unsigned outputs_left;
    uint64_t restart_id;
    uint32_t stream;
};

struct sim {
    struct loop *loop;
    struct fake_service vms;
    struct km_manager *m;
    struct sim_rng rng;
    uint64_t seed;
    unsigned step;
    enum sim_mood mood;
    struct sim_client clients[SIM_CLIENTS];
    struct sim_session sessions[SIM_SESSIONS];
    struct sim_guest guests[64];
    size_t n_guests;
    struct sim_req *reqs;
    size_t n_reqs;
    struct map *by_id;   /* msg_id -> sim_req */
    struct map *numbers; /* kernel id -> uint64_t *: numbered outputs said so far */
    unsigned ops_open, ops_done;
    bool closed;
    unsigned long said, pulled, gaps, deaths, answered, held, throttled;
};

/* Print seed, step and reason, and abort. */
void sim_fail(struct sim *s, const char *fmt, ...) __attribute__((format(printf, 2, 3), noreturn));
#define SIM_CHECK(s, cond, ...)                                                                    \
    do {                                                                                           \
        if (!(cond))                                                                               \
            sim_fail((s), __VA_ARGS__);                                                            \
    } while (0)

/* sim_guest.c */
void sim_guests_turn(struct sim *s);   /* each sandbox does something */
void sim_guests_finish(struct sim *s); /* no more mischief: all do their work to the end */
void sim_guest_kill(struct sim *s);    /* one process dies */
void sim_guest_crash(struct sim *s);   /* one sandbox dies */
void sim_guests_free(struct sim *s);
uint64_t *sim_numbers(struct sim *s, const char *kernel_id);

/* sim_client.c */
void sim_client_attach(struct sim *s, struct sim_client *c, struct km_kernel *k, unsigned session);
void sim_client_detach(struct sim *s, struct sim_client *c);
void sim_client_submit(struct sim *s, struct sim_client *c);
void sim_client_pull(struct sim *s, struct sim_client *c, unsigned max);
