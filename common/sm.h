#pragma once
/* Declared state machines. An object embeds struct sm; a const table says which moves are legal.
 * An illegal move is a programmer error: it logs the machine, both states, and aborts. Peers must
 * not be able to cause one: check with sm_can first where a peer's bytes ask for the move. */
#include <stdbool.h>
#include <stdint.h>

struct sm_state {
    const char *name;
    uint64_t next; /* bit set of states one may move to: SM_TO(A) | SM_TO(B) */
};
#define SM_TO(s) (UINT64_C(1) << (s))

struct sm_def {
    const char *name;
    const struct sm_state *states;
    unsigned n_states; /* at most 64 */
};
struct sm {
    const struct sm_def *def;
    unsigned state;
};

void sm_init(struct sm *m, const struct sm_def *def, unsigned initial);
bool sm_can(const struct sm *m, unsigned to);
void sm_move(struct sm *m, unsigned to); /* a move to itself is a no-op when listed or equal */
const char *sm_name(const struct sm *m);
/* One "A -> B, C" line per state, for docs/ARCHITECTURE.md and its drift test. Caller frees. */
char *sm_describe(const struct sm_def *def);
