# Warnings that every target of ours gets; CV_WERROR turns them into errors (all presets do).
option(CV_WERROR "treat warnings as errors" OFF)
add_library(cv_warnings INTERFACE)
target_compile_options(cv_warnings INTERFACE
    -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition -Wvla
    -Wundef -Wformat=2 -Wwrite-strings -Wpointer-arith -Wcast-qual -Wimplicit-fallthrough
    -Wnull-dereference $<$<BOOL:${CV_WERROR}>:-Werror>)
