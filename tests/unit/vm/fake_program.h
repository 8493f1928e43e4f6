#pragma once
/* A stand-in for QEMU: a script that speaks QMP on descriptor 4 and is told by `mode` how to
 * misbehave (see fake_qemu.py). */
#include "common/err.h"
/* Writes an executable wrapper into dir; returns its path (caller frees). */
char *fake_program(const char *dir, const char *mode);
