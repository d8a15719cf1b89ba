// Reads what a kernel needs of many Python tensors at once, through the DLPack exchange protocol.
#pragma once
#include <pybind11/pybind11.h>

#include "../tensor_table.h"

namespace statestream {

// What the states of a parameter must look like to be taken; anything else is left to the caller.
struct ExpectedStates {
  int32_t exp_avg, exp_avg_sq;
  int32_t master;       // of a parameter that is not FP32, or kNone
  bool step_on_device;  // the counter lies beside the parameter, else on the CPU
};

// Rows of the parameters that are plain, dense, and as expected, grouped by device and formats.
//
// exchange: the capsule torch.Tensor.__dlpack_c_exchange_api__. params: a list. grad_name: the
// attribute that holds the gradient. states: the optimizer's state mapping, read with [] for parameters
// that have a gradient. tensor_types: exact types that may be read by address.
// Returns (calls, left): calls is a list of (device type, device index, five format codes, rows as
// bytes, indices into params); left holds the indices of parameters with a gradient that need a closer look.
pybind11::tuple gather(const pybind11::capsule &exchange, const pybind11::list &params, const pybind11::str &grad_name,
                       const pybind11::object &states, const pybind11::tuple &tensor_types,
                       const ExpectedStates &expected);

}  // namespace statestream
