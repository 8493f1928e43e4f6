/* What a table of options looks like to people: --help and the Markdown reference. */
#include "cli/opts.h"
#include <ctype.h>
#include <string.h>

#define HELP_COLUMN 30
#define HELP_WIDTH 100

/* Wrap text at HELP_WIDTH, continuation lines at HELP_COLUMN; the cursor is at `column` already. */
static void print_wrapped(FILE *f, const char *text, size_t column)
{
    if (column >= HELP_COLUMN) {
        fputc('\n', f);
        column = 0;
    }
    fprintf(f, "%*s", (int)(HELP_COLUMN - column), "");
    column = HELP_COLUMN;
    while (*text) {
        size_t n = strcspn(text, " ");
        if (column > HELP_COLUMN && column + n + 1 > HELP_WIDTH) {
            fprintf(f, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        } else if (column > HELP_COLUMN) {
            fputc(' ', f);
            column++;
        }
        fprintf(f, "%.*s", (int)n, text);
        column += n;
        text += n + (text[n] == ' ');
    }
    fputc('\n', f);
}

static void option_text(const struct opt *o, char *ret, size_t size)
{
    size_t n = (size_t)snprintf(ret, size, "%s", o->help);
    if (o->choices) {
        n += (size_t)snprintf(ret + n, size - n, " (");
        for (size_t i = 0; o->choices[i]; i++)
            n += (size_t)snprintf(ret + n, size - n, "%s%s", i ? ", " : "", o->choices[i]);
        n += (size_t)snprintf(ret + n, size - n, ")");
    }
    if (o->def && o->def[0] && !(o->type == OPT_BOOL && strcmp(o->def, "false") == 0))
        snprintf(ret + n, size - n, " [default: %s]", o->def);
}

void opts_help(const struct opt_command *c, FILE *f)
{
    fprintf(f, "Usage: cellvisor %s %s\n\n%s\n", c->name, c->synopsis, c->summary);
    bool grouped = false;
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (!o->flag) {
            fprintf(f, "\n%s:\n", o->help);
            grouped = true;
            continue;
        }
        if (i == 0 && !grouped)
            fputs("\nOptions:\n", f);
        char head[80], text[800], letter[8] = "    ";
        if (o->letter)
            snprintf(letter, sizeof(letter), "-%c, ", o->letter);
        int n = snprintf(head, sizeof(head), "  %s--%s%s%s", letter, o->flag, o->arg ? " " : "",
                         o->arg ? o->arg : "");
        fputs(head, f);
        option_text(o, text, sizeof(text));
        print_wrapped(f, text, (size_t)n);
    }
    if (c->has_config)
        fputs(
            "\nConfiguration:\n"
            "      --config FILE           JSON file with the same options as keys ('_' for '-');\n"
            "                              environment: CELLVISOR_NAME; flags win over "
            "environment,\n"
            "                              environment over file\n",
            f);
    if (c->examples)
        fprintf(f, "\nExamples:\n%s", c->examples);
    if (c->exits)
        fprintf(f, "\nExit codes:\n%s", c->exits);
}

/* The three names of an option as table cells. */
static void markdown_names(const struct opt *o, FILE *f)
{
    fprintf(f, "| `--%s%s%s` | ", o->flag, o->arg ? " " : "", o->arg ? o->arg : "");
    if (o->flags & OPT_FLAG_ONLY) {
        fputs("- | - | ", f);
        return;
    }
    fputc('`', f);
    for (const char *p = o->flag; *p; p++)
        fputc(*p == '-' ? '_' : *p, f);
    fputs("` | `CELLVISOR_", f);
    for (const char *p = o->flag; *p; p++)
        fputc(*p == '-' ? '_' : toupper((unsigned char)*p), f);
    fputs("` | ", f);
}

void opts_markdown(const struct opt_command *c, FILE *f)
{
    fprintf(f, "### cellvisor %s %s\n\n%s\n", c->name, c->synopsis, c->summary);
    bool table = false;
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (!o->flag || !table)
            fprintf(
                f,
                "\n%s\n\n| flag | key | environment | default | meaning |\n|---|---|---|---|---|\n",
                o->flag ? "Options" : o->help);
        table = true;
        if (!o->flag)
            continue;
        markdown_names(o, f);
        fprintf(f, "%s | %s", o->def && o->def[0] ? o->def : "-", o->help);
        for (size_t k = 0; o->choices && o->choices[k]; k++)
            fprintf(f, "%s`%s`", k ? ", " : ": ", o->choices[k]);
        fputs(" |\n", f);
    }
    if (c->exits)
        fprintf(f, "\nExit codes:\n\n```\n%s```\n", c->exits);
    fputc('\n', f);
}
