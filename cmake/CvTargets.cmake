# Helpers: a library per folder, an executable, a unit test per source file, a fuzz target.

add_library(cv_options INTERFACE)
target_compile_features(cv_options INTERFACE c_std_17)
target_compile_definitions(cv_options INTERFACE _GNU_SOURCE CELLVISOR_VERSION="${PROJECT_VERSION}")
target_include_directories(cv_options INTERFACE ${PROJECT_SOURCE_DIR})
target_link_libraries(cv_options INTERFACE cv_warnings cv_hardening cv_sanitizers)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# cv_library(NAME SOURCES a.c ... DEPENDS lib ...)
function(cv_library name)
    cmake_parse_arguments(A "" "" "SOURCES;DEPENDS" ${ARGN})
    add_library(${name} STATIC ${A_SOURCES})
    target_link_libraries(${name} PUBLIC cv_options ${A_DEPENDS})
endfunction()

# cv_executable(NAME OUTPUT file SOURCES a.c ... DEPENDS lib ...): all binaries land in BUILD/bin.
function(cv_executable name)
    cmake_parse_arguments(A "" "OUTPUT" "SOURCES;DEPENDS" ${ARGN})
    add_executable(${name} ${A_SOURCES})
    target_link_libraries(${name} PRIVATE cv_options ${A_DEPENDS})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
    if(A_OUTPUT)
        set_target_properties(${name} PROPERTIES OUTPUT_NAME ${A_OUTPUT})
    endif()
endfunction()

# cmocka's assert_non_null ends a test by longjmp, which the compiler cannot see. Linked last: the
# last option counts.
add_library(cv_test_warnings INTERFACE)
target_compile_options(cv_test_warnings INTERFACE -Wno-null-dereference)

# cv_unit_test(FOLDER FILE DEPENDS lib ...): tests/unit/FOLDER/FILE_test.c -> ctest unit.FOLDER.FILE
function(cv_unit_test folder file)
    cmake_parse_arguments(A "" "LABEL;TIMEOUT" "DEPENDS;SOURCES" ${ARGN})
    set(target test_${folder}_${file})
    add_executable(${target} ${PROJECT_SOURCE_DIR}/tests/unit/${folder}/${file}_test.c ${A_SOURCES})
    target_link_libraries(${target} PRIVATE cv_options PkgConfig::CMOCKA ${A_DEPENDS}
        cv_test_warnings)
    target_compile_definitions(${target} PRIVATE TEST_SOURCE_DIR="${PROJECT_SOURCE_DIR}/tests")
    add_test(NAME unit.${folder}.${file} COMMAND ${target})
    if(NOT A_LABEL)
        set(A_LABEL unit)
    endif()
    if(NOT A_TIMEOUT)
        set(A_TIMEOUT 60)
    endif()
    set_tests_properties(unit.${folder}.${file} PROPERTIES LABELS ${A_LABEL} TIMEOUT ${A_TIMEOUT})
endfunction()

# cv_fuzz_target(NAME DEPENDS lib ...): tests/fuzz/fuzz_NAME.c with corpus tests/fuzz/corpus/NAME.
# CV_FUZZ on: libFuzzer. Off: tests/fuzz/fuzz_main.c replays corpus and old crashes as a ctest.
option(CV_FUZZ "build libFuzzer binaries (clang)" OFF)
function(cv_fuzz_target name)
    cmake_parse_arguments(A "" "" "DEPENDS" ${ARGN})
    set(dir ${PROJECT_SOURCE_DIR}/tests/fuzz)
    if(CV_FUZZ)
        add_executable(fuzz_${name} ${dir}/fuzz_${name}.c)
        target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
    else()
        add_executable(fuzz_${name} ${dir}/fuzz_${name}.c ${dir}/fuzz_main.c)
        add_test(NAME fuzzreg.${name} COMMAND fuzz_${name} ${dir}/corpus/${name} ${dir}/crash/${name})
        set_tests_properties(fuzzreg.${name} PROPERTIES LABELS fuzzreg TIMEOUT 60)
    endif()
    target_link_libraries(fuzz_${name} PRIVATE cv_options ${A_DEPENDS})
    set_target_properties(fuzz_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
endfunction()
