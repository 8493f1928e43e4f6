/* cellvisor: the table of subcommands. Everything else is in cmd_*.c. */
#include "cli/cli.h"
#include "common/json.h"
#include <signal.h>
#include <stdio.h>
#include <string.h>

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    { "serve", cmd_serve, "serve kernels in microVMs over the Jupyter protocol" },
    { "run", cmd_run, "run a file or a line of code in a fresh sandbox" },
    { "template", cmd_template, "build, list, inspect and remove templates" },
    { "doctor", cmd_doctor, "say what this machine offers and what is missing" },
};
#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void usage(FILE *f)
{
    fputs("Usage: cellvisor COMMAND [OPTION ...]\n\n"
          "A Jupyter gateway that runs every kernel in a microVM of its own.\n\nCommands:\n",
          f);
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(f, "  %-12s %s\n", commands[i].name, commands[i].summary);
    fputs("\n`cellvisor COMMAND --help` shows a command's options, examples and exit codes.\n"
          "Exit codes of all commands: 0 done, 1 failed, 2 wrong usage or configuration,\n"
          "3 this machine cannot (port taken, program or template missing), 124 timeout.\n",
          f);
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    if (argc < 2) {
        usage(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--version") == 0 || strcmp(name, "version") == 0) {
        puts("cellvisor " CELLVISOR_VERSION);
        return CLI_OK;
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        usage(stdout);
        return CLI_OK;
    }
    const char *known[N_COMMANDS + 1] = { NULL };
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(name, commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
        known[i] = commands[i].name;
    }
    const char *near = json_nearest(name, known);
    fprintf(stderr, "cellvisor: unknown command \"%.60s\"", name);
    if (near)
        fprintf(stderr, "; did you mean \"%s\"?\n", near);
    else
        fputs("; see `cellvisor --help`\n", stderr);
    return CLI_USAGE;
}
