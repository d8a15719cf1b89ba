// Reads what a kernel needs of many Python tensors at once, through the DLPack exchange protocol.
#pragma once
#include <pybind11/pybind11.h>

#include <map>

#include "../tensor_table.h"

namespace statestream {

// What the states of a parameter must look like to be taken; anything else is left to the caller.
struct ExpectedStates {
  int32_t exp_avg, exp_avg_sq;
  std::map<int32_t, int32_t> masters;  // by a parameter's format; of those that it lacks there is none
  bool step_on_device;                 // the counter lies beside the parameter, else on the CPU
  bool extras;                         // whether rows have some
};

// How Python's objects hold memory.
struct TensorTypes {
  pybind11::tuple plain;  // exact types that may be read by address
  PyTypeObject *sharded;  // of DTensors, whose local tensor is read in their place; null: they need a closer look
  pybind11::dict scales;  // of scaled states, as StateFactory holds them: {param: {state's name: scales}}
};

// Rows of the parameters that are dense and as expected, grouped by device and formats.
//
// exchange: the capsule torch.Tensor.__dlpack_c_exchange_api__. params: a list. grad_name: the
// attribute that holds the gradient. states: the optimizer's state mapping, read with [] for parameters
// that have a gradient. first_ordinal: params[0]'s number among all parameters.
// Returns (calls, left): calls is a list of (device type, device index, five format codes, rows as
// bytes, extras as bytes, params, their local tensors); left holds the indices of parameters with a gradient that need
// a closer look. Extras hold the scales, and indices of tensors that are whole.
pybind11::tuple gather(const pybind11::capsule &exchange, const pybind11::list &params, const pybind11::str &grad_name,
                       const pybind11::object &states, const TensorTypes &types, const ExpectedStates &expected,
                       int64_t first_ordinal);

}  // namespace statestream
