# SPDX-License-Identifier: Apache-2.0
# What was decided, in one place.

message(STATUS "ringattn ${PROJECT_VERSION}")
message(STATUS "  torch         ${TORCH_VERSION} at ${TORCH_ROOT}")
if(RINGATTN_WITH_CUDA AND RINGATTN_KERNELS)
  message(STATUS "  CUDA kernels  yes: ${RINGATTN_KERNELS}")
elseif(RINGATTN_WITH_CUDA)
  message(STATUS "  CUDA kernels  yes: CUDA ${CUDAToolkit_VERSION}, architectures ${RINGATTN_CUDA_ARCHITECTURES}")
else()
  message(STATUS "  CUDA kernels  no: ${RINGATTN_NO_CUDA_BECAUSE}")
endif()
message(STATUS "  Python _C     ${RINGATTN_BUILD_PYTHON}")
message(STATUS "  C++ tests     ${RINGATTN_BUILD_TESTS}")
if(RINGATTN_SANITIZE)
  message(STATUS "  sanitizers    ${RINGATTN_SANITIZE}")
endif()
