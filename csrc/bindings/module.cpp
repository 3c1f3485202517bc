// SPDX-License-Identifier: Apache-2.0
// ringattn._C: plain values in, plain values out. Tensors go through torch.ops.ringattn.

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <torch/version.h>
#include <unistd.h>

#include <string>

#include "bindings/definitions.h"
#include "core/interrupt.h"

#ifdef RINGATTN_WITH_CUDA
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif

namespace py = pybind11;

namespace ringattn {
namespace {

// What Ctrl-C raises leaves a wait as the Python exception that it is. Python handles signals on
// the process's main thread alone.
void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

py::dict build_info() {
  py::dict info;
  info["torch_version"] = TORCH_VERSION;
  py::list families;
#ifdef RINGATTN_WITH_CUDA
  info["cuda"] = true;
  info["cuda_version"] =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  info["nccl_version"] = std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) + "." +
                         std::to_string(NCCL_PATCH);
  families.append("sm80");
  families.append("sm90");
#else
  info["cuda"] = false;
  info["cuda_version"] = py::none();
  info["nccl_version"] = py::none();
#endif
  info["kernel_families"] = families;
  return info;
}

}  // namespace
}  // namespace ringattn

PYBIND11_MODULE(_C, m) {
  using namespace ringattn;  // NOLINT: this is the whole program
  set_interrupt_check(&check_signals);
  m.doc() =
      "Partition arithmetic, planner, timings and group state of libringattn, as plain values.";
  def_partition(m);
  def_planner(m);
  def_runtime(m);
  m.def("build_info", &build_info);
}
