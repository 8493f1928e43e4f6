/* One pass over the text, writing what is to be seen; carriage return and backspace take back what
 * was written since the last newline. Sequences that end nowhere swallow the rest: that is what a
 * terminal would do. */
#include "kernelmgr/text.h"

#define ESC 0x1b
#define BEL 0x07

/* Length of the escape sequence at the start of s (s.p[0] is ESC). */
static size_t escape_len(struct slice s)
{
    size_t i = 2;
    if (s.n < 2)
        return s.n;
    if (s.p[1] == '[') { /* CSI: parameters, then a final byte 0x40..0x7e */
        while (i < s.n && (s.p[i] < 0x40 || s.p[i] > 0x7e))
            i++;
        return i < s.n ? i + 1 : s.n;
    }
    if (s.p[1] == ']') { /* OSC: up to BEL or ESC backslash */
        while (i < s.n && s.p[i] != BEL && s.p[i] != ESC)
            i++;
        if (i < s.n && s.p[i] == ESC)
            i++;
        return i < s.n ? i + 1 : s.n;
    }
    return s.p[1] >= 0x40 && s.p[1] <= 0x5f ? 2 : 1;
}

/* Take back the last character of the current line. */
static void backspace(struct buf *out)
{
    while (out->len && (out->data[out->off + out->len - 1] & 0xc0) == 0x80)
        buf_truncate(out, out->len - 1);
    if (out->len && out->data[out->off + out->len - 1] != '\n')
        buf_truncate(out, out->len - 1);
}

/* A carriage return before other text: that text replaces the line. */
static void line_start(struct buf *out)
{
    while (out->len && out->data[out->off + out->len - 1] != '\n')
        buf_truncate(out, out->len - 1);
}

int km_text_plain(struct slice s, struct buf *out)
{
    bool returned = false;
    for (size_t i = 0; i < s.n;) {
        uint8_t c = s.p[i];
        int r = 0;
        if (c == ESC) {
            i += escape_len(slice_of(s.p + i, s.n - i));
            continue;
        }
        i++;
        if (c == '\r') {
            returned = true;
            continue;
        }
        if (returned && c != '\n')
            line_start(out);
        returned = false;
        if (c == '\b')
            backspace(out);
        else if (c >= 0x20 || c == '\n' || c == '\t')
            r = buf_append_byte(out, c);
        if (r < 0)
            return r;
    }
    return 0;
}

int km_text_newline(struct buf *out)
{
    if (!out->len || out->data[out->off + out->len - 1] == '\n')
        return 0;
    return buf_append_byte(out, '\n');
}
