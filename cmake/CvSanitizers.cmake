# CV_SANITIZE: a comma list for -fsanitize=, e.g. "address,undefined". CV_COVERAGE: gcov counters.
set(CV_SANITIZE "" CACHE STRING "sanitizers for every target")
option(CV_COVERAGE "instrument for gcov" OFF)
add_library(cv_sanitizers INTERFACE)
if(CV_SANITIZE)
    target_compile_options(cv_sanitizers INTERFACE
        -fsanitize=${CV_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(cv_sanitizers INTERFACE -fsanitize=${CV_SANITIZE})
endif()
if(CV_COVERAGE)
    target_compile_options(cv_sanitizers INTERFACE --coverage)
    target_link_options(cv_sanitizers INTERFACE --coverage)
endif()
