# SPDX-License-Identifier: Apache-2.0
# What every target of this project has in common.

set(RINGATTN_WARNINGS -Wall -Wextra -Wno-unused-parameter)

# Include path, warnings, sanitizers, and a search path that works in site-packages: torch and the
# NVIDIA libraries lie beside the package. Importing torch first has them loaded already.
function(ringattn_library_properties target)
  target_include_directories(${target} PUBLIC "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${RINGATTN_WARNINGS}>)
  target_link_options(${target} PRIVATE -Wl,--as-needed)
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
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib;$ORIGIN/../nvidia/nccl/lib;$ORIGIN/../nvidia/cu13/lib"
    INSTALL_RPATH_USE_LINK_PATH OFF)
endfunction()

# An object library of CUDA sources for the given architectures, linked into libringattn.
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
  target_sources(ringattn PRIVATE $<TARGET_OBJECTS:${name}>)
endfunction()
