#pragma once
/* Functions that we do not use; tests/lint greps for them too. Include last in a .c file if at all.
 */
#define BANNED(name) sorry_##name##_is_banned
#undef strcpy
#define strcpy(d, s) BANNED(strcpy)
#undef strcat
#define strcat(d, s) BANNED(strcat)
#undef sprintf
#define sprintf(...) BANNED(sprintf)
#undef strtok
#define strtok(s, d) BANNED(strtok)
#undef localtime
#define localtime(t) BANNED(localtime)
#undef gmtime
#define gmtime(t) BANNED(gmtime)
