#pragma once
/* The subcommands and what they share. Each cmd_X gets argv with argv[0] = its own name and returns
 * the process's exit code. cli/ is the only folder that wires all the others together. */
#include "common/err.h"

enum cli_exit {
    CLI_OK = 0,
    CLI_FAILED = 1,      /* the thing asked for was done and failed (code raised, build failed) */
    CLI_USAGE = 2,       /* wrong options, arguments, configuration file or recipe */
    CLI_ENVIRONMENT = 3, /* this machine cannot: port taken, QEMU missing, template not built ... */
    CLI_TIMEOUT = 124,   /* `run`: the code did not end in time */
    CLI_INTERRUPTED = 130 /* ended by Ctrl-C before it was done */
};

int cmd_serve(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_template(int argc, char **argv);

/* "cellvisor CMD: TEXT" on stderr; returns code. */
int cli_fail(const char *cmd, int code, const struct err *e);
/* The state directory: `given` (NULL or "" = ~/.local/share/cellvisor; "~/" is expanded), made
 * absolute and created 0700. Caller frees. NULL with e on failure. */
char *cli_state_dir(const char *given, struct err *e);
/* Path of the shim binary: `given`, else beside this executable, else in ../libexec/cellvisor.
 * Caller frees; NULL with e when there is none. */
char *cli_shim_path(const char *given, struct err *e);
