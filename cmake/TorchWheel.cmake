# SPDX-License-Identifier: Apache-2.0
# The torch that is installed in the active Python, as plain imported targets:
#
#   torch::cpu    libtorch_cpu and libc10, their headers (pybind11's among them)
#   torch::cuda   the above with libtorch_cuda and libc10_cuda; only where torch is a CUDA build
#   torch::nccl   the NCCL that this torch uses; only where torch is a CUDA build
#
# find_package(Torch) is not used: it fails without a CUDA toolkit when torch is a CUDA build, and it
# rewrites CMAKE_CUDA_FLAGS and CMAKE_CUDA_ARCHITECTURES for the whole project.

# Finding the package does not import it: 20 ms instead of 2 s.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c [==[
import importlib.util, pathlib, sys
torch = importlib.util.find_spec("torch")
if torch is None:
    sys.exit(1)
root = pathlib.Path(torch.origin).parent
version = {}
exec((root / "version.py").read_text(), version)
nvidia = importlib.util.find_spec("nvidia")
folders = nvidia.submodule_search_locations if nvidia else []
nccl = [f"{folder}/nccl" for folder in folders if pathlib.Path(folder, "nccl/lib/libnccl.so.2").exists()]
print(root, version["__version__"], version["cuda"] or "", nccl[0] if nccl else "", sep=";")
]==]
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing)
if(torch_missing)
  message(FATAL_ERROR
    "ringattn builds against the torch that is installed, and ${Python_EXECUTABLE} has none: install torch "
    "first, then type: pip install --no-build-isolation .")
endif()
list(GET torch_facts 0 TORCH_ROOT)
list(GET torch_facts 1 TORCH_VERSION)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TORCH_RELEASE "${TORCH_VERSION}")
list(GET torch_facts 2 TORCH_CUDA_VERSION)
list(GET torch_facts 3 TORCH_NCCL_ROOT)

function(ringattn_import_torch_library name)
  if(EXISTS "${TORCH_ROOT}/lib/lib${name}.so")
    add_library(torch::${name} SHARED IMPORTED)
    set_target_properties(torch::${name} PROPERTIES
      IMPORTED_LOCATION "${TORCH_ROOT}/lib/lib${name}.so"
      IMPORTED_SONAME "lib${name}.so")
  endif()
endfunction()
foreach(name c10 torch_cpu c10_cuda torch_cuda)
  ringattn_import_torch_library(${name})
endforeach()

add_library(torch_cpu_interface INTERFACE)
add_library(torch::cpu ALIAS torch_cpu_interface)
target_include_directories(torch_cpu_interface SYSTEM INTERFACE
  "${TORCH_ROOT}/include" "${TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(torch_cpu_interface INTERFACE USE_DISTRIBUTED)
target_link_libraries(torch_cpu_interface INTERFACE torch::torch_cpu torch::c10)

if(TARGET torch::torch_cuda)
  add_library(torch_cuda_interface INTERFACE)
  add_library(torch::cuda ALIAS torch_cuda_interface)
  target_link_libraries(torch_cuda_interface INTERFACE torch::cpu torch::torch_cuda torch::c10_cuda)

  if(TORCH_NCCL_ROOT)
    # The wheel has libnccl.so.2 and no libnccl.so, so find_library(nccl) would take another one.
    set(nccl_library "${TORCH_NCCL_ROOT}/lib/libnccl.so.2")
    set(nccl_include "${TORCH_NCCL_ROOT}/include")
  else()
    find_library(nccl_library NAMES nccl libnccl.so.2)
    find_path(nccl_include nccl.h)
  endif()
  if(nccl_library AND nccl_include)
    add_library(torch::nccl SHARED IMPORTED)
    set_target_properties(torch::nccl PROPERTIES
      IMPORTED_LOCATION "${nccl_library}"
      IMPORTED_SONAME "libnccl.so.2"
      INTERFACE_INCLUDE_DIRECTORIES "${nccl_include}")
  endif()
endif()
