# SPDX-License-Identifier: Apache-2.0
# Decides whether the build has CUDA kernels. RINGATTN_CUDA is AUTO, ON or OFF; the answer is
# RINGATTN_WITH_CUDA, and with it RINGATTN_CUDA_VERSION, the target CUDA::cudart and, unless RINGATTN_KERNELS
# names kernels that are built already, the language CUDA.

set(RINGATTN_WITH_CUDA OFF)
set(RINGATTN_NO_CUDA_BECAUSE "")
set(RINGATTN_CUDA_VERSION "")

if(RINGATTN_CUDA STREQUAL "OFF")
  set(RINGATTN_NO_CUDA_BECAUSE "RINGATTN_CUDA is OFF")
elseif(NOT TARGET torch::cuda)
  set(RINGATTN_NO_CUDA_BECAUSE "the installed torch ${TORCH_VERSION} is a CPU build")
elseif(NOT TARGET torch::nccl)
  set(RINGATTN_NO_CUDA_BECAUSE "the NCCL that torch uses was not found")
else()
  # Must be set before the language is enabled: otherwise CMake adds a default architecture to every target.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS "/usr/local/cuda/bin/nvcc")
    set(CMAKE_CUDA_COMPILER "/usr/local/cuda/bin/nvcc")
  endif()
  if(NOT RINGATTN_KERNELS)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER AND NOT CUDAToolkit_ROOT)
    cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH CUDAToolkit_ROOT)
  endif()
  find_package(CUDAToolkit QUIET)
  string(REGEX MATCH "^[0-9]+" torch_cuda_major "${TORCH_CUDA_VERSION}")
  if(NOT CMAKE_CUDA_COMPILER AND NOT RINGATTN_KERNELS)
    set(RINGATTN_NO_CUDA_BECAUSE "no nvcc was found")
  elseif(NOT CUDAToolkit_FOUND)
    set(RINGATTN_NO_CUDA_BECAUSE "no CUDA toolkit was found")
  elseif(CUDAToolkit_VERSION VERSION_LESS 12.5)
    # Before it there is no way to the driver's functions through the runtime.
    set(RINGATTN_NO_CUDA_BECAUSE "the CUDA toolkit must be 12.5 or newer, got ${CUDAToolkit_VERSION}")
  elseif(NOT CUDAToolkit_VERSION_MAJOR EQUAL torch_cuda_major)
    # The process has one CUDA runtime, torch's; its binary interface is that of a major version.
    set(RINGATTN_NO_CUDA_BECAUSE
      "the CUDA toolkit must be ${torch_cuda_major}.x as torch ${TORCH_VERSION} needs, got ${CUDAToolkit_VERSION}")
  else()
    set(RINGATTN_WITH_CUDA ON)
  endif()
endif()

if(RINGATTN_CUDA STREQUAL "ON" AND NOT RINGATTN_WITH_CUDA)
  message(FATAL_ERROR "RINGATTN_CUDA is ON, but ${RINGATTN_NO_CUDA_BECAUSE}")
endif()

if(RINGATTN_WITH_CUDA)
  if(NOT RINGATTN_KERNELS)
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # CMake 3.25.1 (Debian 12) does not know the flag of nvcc for C++20.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    endif()
  endif()
  set(RINGATTN_CUDA_VERSION "${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}")
  if(RINGATTN_CUDA_VERSION VERSION_GREATER TORCH_CUDA_VERSION)
    message(WARNING
      "the CUDA toolkit ${RINGATTN_CUDA_VERSION} is newer than the CUDA runtime ${TORCH_CUDA_VERSION} of torch")
  endif()
endif()
