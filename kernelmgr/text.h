#pragma once
/* Terminal text made plain for agents and files: escape sequences (CSI, OSC, lone ESC) removed,
 * carriage returns and backspaces folded into what a terminal would show (case-16, case-176). */
#include "common/buf.h"

int km_text_plain(struct slice s, struct buf *out); /* appends */
int km_text_newline(struct buf *out);               /* unless out is empty or ends with one */
