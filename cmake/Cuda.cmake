# SPDX-License-Identifier: Apache-2.0
# Decides whether CUDA kernels are built. RINGATTN_CUDA is AUTO, ON or OFF; the answer is
# RINGATTN_WITH_CUDA, and with it the language CUDA and the target CUDA::cudart.

set(RINGATTN_WITH_CUDA OFF)
set(RINGATTN_NO_CUDA_BECAUSE "")

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
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(RINGATTN_WITH_CUDA ON)
  else()
    set(RINGATTN_NO_CUDA_BECAUSE "no nvcc was found")
  endif()
endif()

if(RINGATTN_CUDA STREQUAL "ON" AND NOT RINGATTN_WITH_CUDA)
  message(FATAL_ERROR "RINGATTN_CUDA is ON, but ${RINGATTN_NO_CUDA_BECAUSE}")
endif()

if(RINGATTN_WITH_CUDA)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  if(NOT "${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}" STREQUAL TORCH_CUDA_VERSION)
    message(WARNING "nvcc is ${CUDAToolkit_VERSION}, but torch was built for CUDA ${TORCH_CUDA_VERSION}")
  endif()
endif()
