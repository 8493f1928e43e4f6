# Hardening of release builds (the compiler's own checks; sanitizer builds leave it out).
add_library(cv_hardening INTERFACE)
# assert() stays on in every build type (HACKING.md, errors).
target_compile_options(cv_hardening INTERFACE -UNDEBUG)
if(CMAKE_BUILD_TYPE MATCHES "^(Release|RelWithDebInfo)$" AND NOT CV_SANITIZE)
    target_compile_options(cv_hardening INTERFACE
        -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2 -fstack-protector-strong -fstack-clash-protection
        -fcf-protection -fPIE
        $<$<C_COMPILER_ID:GNU>:-ftrivial-auto-var-init=zero>
        $<$<C_COMPILER_ID:Clang>:-ftrivial-auto-var-init=pattern>)
    target_link_options(cv_hardening INTERFACE -pie -Wl,-z,relro,-z,now)
endif()
