# SPDX-License-Identifier: Apache-2.0
# What every target of this project has in common.

set(RINGATTN_WARNINGS -Wall -Wextra -Wno-unused-parameter)

# Note: libtorch uses the shared libstdc++, and so must we. Some compilers link the static one by default;
# with two in a process, each takes the other's locale facets for its own, and the first number that is
# written to a stream crashes. Named here, the shared one comes before what the compiler adds.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
  OUTPUT_VARIABLE libstdcxx_of_compiler OUTPUT_STRIP_TRAILING_WHITESPACE)
if(IS_ABSOLUTE "${libstdcxx_of_compiler}" AND EXISTS "${libstdcxx_of_compiler}")
  set(RINGATTN_LIBSTDCXX "${libstdcxx_of_compiler}")
else()
  find_library(RINGATTN_LIBSTDCXX NAMES libstdc++.so.6
    HINTS /usr/lib/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu /usr/lib64 /lib64)
endif()

# Include path, warnings, sanitizers, and a search path that works in site-packages: torch and the
# NVIDIA libraries lie beside the package, whose folder is `package` as seen from the installed target.
# Importing torch first has them loaded already.
function(ringattn_library_properties target package)
  target_include_directories(${target} PUBLIC "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${RINGATTN_WARNINGS}>)
  target_link_options(${target} PRIVATE -Wl,--as-needed)
  if(RINGATTN_LIBSTDCXX)
    target_link_libraries(${target} PRIVATE "${RINGATTN_LIBSTDCXX}")
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "SHARED_LIBRARY" AND NOT RINGATTN_SANITIZE)
    target_link_options(${target} PRIVATE -Wl,-z,defs)
  endif()
  if(RINGATTN_SANITIZE)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${RINGATTN_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=undefined;-g>)
    target_link_options(${target} PRIVATE -fsanitize=${RINGATTN_SANITIZE})
  endif()
  set_target_properties(${target} PROPERTIES
    INSTALL_RPATH
      "$ORIGIN;${package};${package}/../torch/lib;${package}/../nvidia/nccl/lib;${package}/../nvidia/cu13/lib"
    INSTALL_RPATH_USE_LINK_PATH OFF)
endfunction()

# An object library of CUDA sources for the given architectures, linked into libringattn_kernels.
function(ringattn_add_kernels name architectures)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES
    CUDA_ARCHITECTURES "${architectures}"
    # Never the static runtime: the process would have two, torch's and ours.
    CUDA_RUNTIME_LIBRARY Shared)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall
      $<$<BOOL:${RINGATTN_PTXAS_VERBOSE}>:-Xptxas=-v>>)
  target_sources(ringattn_kernels PRIVATE $<TARGET_OBJECTS:${name}>)
endfunction()
