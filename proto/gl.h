#pragma once
/* Guest link: the one byte stream between host and a VM (virtio-serial, vsock, socketpair), spec in
 * docs/guestlink.md. Both ends use this code. Everything read is hostile.
 *
 * Frame: u32le payload length (<= GL_FRAME_MAX), u8 type, u8 flags, u16le check, u32le stream.
 * check = low 16 bits of (length * 0x9E3779B1 + (type | flags << 8) * 0x85EBCA77 + stream *
 * 0xC2B2AE3D)
 * >> 16 of the 32-bit sum (tells desync at once). A message longer than a frame is cut into frames
 * of the same type and stream with GL_MORE on all but the last; frames of other streams may lie
 * between. Frames of one stream never interleave two messages.
 *
 * Stream 0 is control: JSON payloads, no credit, small. Streams 1..GL_STREAMS_MAX-1 are kernels
 * (numbers chosen by the host). Their bulk types are credited: payload bytes count against a window
 * that the receiver re-opens with GL_CREDIT. Initial window GL_WINDOW each way per stream. */
#include "common/err.h"
#include "common/slice.h"

#define GL_VERSION 1
#define GL_HEADER 12u
#define GL_FRAME_MAX (64u << 10)
#define GL_WINDOW (4u << 20)
#define GL_STREAMS_MAX 64u
#define GL_FLAG_MORE 1

enum gl_type {
    GL_HELLO = 1, /* both, first: {"version":1,"role":"host|guest","shim":"0.1.0","mode":"vm|local",
                     "kernels":[{"stream":1,"spec":"python3","state":"running"}]} */
    GL_SPECS =
        2, /* G: {"default":name,"kernelspecs":{name:{"spec":{...},"resources":{file:base64}}}} */
    GL_PREPARE =
        3, /* H (template build): {"spec":"python3","preload":code,"warmup":code,"timeout_ms":n}:
              start a kernel as stream 1, run preload */
    GL_PREPARED = 4, /* G: {"ok":true,"ms":n,"info":{kernel_info_reply content}} |
                        {"ok":false,"error":text} */
    GL_RESUME = 5,   /* H after every restore: {"generation":n,"entropy":base64 of 64 bytes,
                        "realtime_us":n,"hostname":s,"machine_id":hex32,"warmup":code or null} */
    GL_RESUMED =
        6, /* G: {"ok":true,"us":{"entropy":n,"clock":n,"hooks":n}} | {"ok":false,"error":text} */
    GL_ASSIGN = 7, /* H when handed to a user: {"realtime_us":n,"hostname":s,"env":{k:v},"cwd":s} */
    GL_ASSIGNED = 8, /* G: {"ok":true} | {"ok":false,"error":text} */
    GL_SHUTDOWN = 9, /* H: {"grace_ms":n}: stop kernels, sync, power off (local: exit) */
    GL_PING = 10,    /* both: up to 64 bytes, echoed by GL_PONG */
    GL_PONG = 11,
    GL_LOG = 12,          /* G: {"level":"info","text":s}: shim diagnostics, build progress */
    GL_EVENT = 13,        /* G: {"kind":"oom|disk|...", ...} */
    GL_CREDIT = 14,       /* both, any kernel stream: u32le bytes */
    GL_KERNEL_START = 16, /* H: {"spec":name,"env":{},"cwd":s or null} */
    GL_KERNEL_STATE =
        17,              /* G: {"state":"starting|running|exited","pid":n,"exit_code":n|null,
                            "signal":n|null,"reason":"exit|signal|oom|start_failed|stopped","tail":s,
                            "info":{...} when running} */
    GL_KERNEL_CTL = 18,  /* H: {"id":n,"op":"interrupt|restart|stop|kill"} */
    GL_KERNEL_DONE = 19, /* G: {"id":n,"ok":true} | {"id":n,"ok":false,"error":text} */
    GL_KERNEL_MSG = 20,  /* both, credited: jp_body */
    GL_KERNEL_OUT = 21,  /* G, credited: u8 fd (1 or 2), bytes written past the protocol */
    /* 32..47 exec and pty, 48..63 files, 64..79 TCP: reserved, refused by this version */
};
const char *gl_type_name(enum gl_type t);

enum gl_role { GL_HOST, GL_GUEST };
/* State of the link as the table of legal frames sees it. */
enum gl_phase {
    GL_PHASE_HELLO,   /* nothing but GL_HELLO */
    GL_PHASE_IDLE,    /* template build or parked: hello, prepare, resume, assign families */
    GL_PHASE_RUNNING, /* assigned: everything but hello/prepare */
};

struct gl_link;
struct gl_link_ops {
    /* A whole, legal message; payload is valid during the call only. The callee may send, grant,
     * close streams, change the phase, reset or free the link; it may not feed it. GL_CREDIT never
     * comes here; GL_PING does, and the callee answers it with GL_PONG. */
    void (*message)(void *ctx, enum gl_type type, uint32_t stream, struct slice payload);
    /* Bytes wait in gl_link_output (called on the change from none to some). May be NULL. */
    void (*output)(void *ctx);
    /* A stream that gl_link_send refused or that was over the low-water mark (half of its queue)
     * can take more; stream 0 also stands for urgent frames. May be NULL. */
    void (*writable)(void *ctx, uint32_t stream);
};
struct gl_limits {
    size_t message_max; /* of one reassembled kernel message; control is capped at 16 MiB */
    size_t queue_max;   /* bytes waiting per stream before gl_link_send refuses */
};

struct gl_link *gl_link_new(enum gl_role role, const struct gl_limits *limits,
                            const struct gl_link_ops *ops, void *ctx);
void gl_link_free(struct gl_link *l); /* NULL ok; also from inside ops->message */
void gl_link_set_phase(struct gl_link *l, enum gl_phase p);
enum gl_phase gl_link_phase(const struct gl_link *l);
/* Forget partial frames, queued bytes and credits; phase HELLO: after a reconnect or a restore. */
void gl_link_reset(struct gl_link *l);
/* Bytes from the peer. 0, or -EPROTO/-E2BIG with e saying which rule was broken: kill the peer
 * (-ENOMEM: out of memory for a message in the making). After an error every feed fails until
 * gl_link_reset. */
int gl_link_feed(struct gl_link *l, struct slice bytes, struct err *e);
/* Queue one message made of n parts (copied). 0; -EAGAIN: queue of that stream is full
 * (ops->writable will tell; an empty queue takes any message); -E2BIG: over message_max or the
 * type's own maximum; -EINVAL: shorter than the type's minimum (2 for JSON); -ENOMEM. Illegal type
 * for our role or phase, wrong kind of stream: programmer error, aborts.
 * Order: control first. GL_KERNEL_CTL and GL_KERNEL_DONE pass bulk of their stream that waits for
 * credit (but DONE never a queued GL_KERNEL_STATE); STATE and START keep their place in it. */
int gl_link_send(struct gl_link *l, enum gl_type type, uint32_t stream, const struct slice *parts,
                 size_t n);
/* Next bytes to write, control first, then kernel streams in turn, as credit allows; empty: none
 * now. Valid until the next call on the link other than gl_link_send, _feed or _grant. */
struct slice gl_link_output(struct gl_link *l);
void gl_link_consumed(struct gl_link *l, size_t n);
/* The receiver has disposed of n credited bytes of this stream (payload.n of each GL_KERNEL_MSG and
 * GL_KERNEL_OUT it was given): the window is re-opened (frames are sent in steps of at least a
 * quarter window). Messages larger than the window are kept flowing by the link itself. Granting
 * too much is harmless. */
void gl_link_grant(struct gl_link *l, uint32_t stream, size_t n);
size_t gl_link_queued(const struct gl_link *l, uint32_t stream); /* bytes not yet written */
/* The stream's kernel is gone: forget bulk messages that wait (a half-written one is finished,
 * STATE and DONE still go out), the partial message, and hand back the whole window. Bulk that
 * still comes in is thrown away until GL_KERNEL_START, or until this side sends on the stream
 * again. */
void gl_link_close_stream(struct gl_link *l, uint32_t stream);
