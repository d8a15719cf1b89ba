#include "gather.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_set>
#include <vector>

namespace py = pybind11;

namespace statestream {
namespace {

// The parts of DLPack 1's ABI that are read here.
struct DlTensor {
  void *data;
  int32_t device_type, device_index;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

struct DlExchangeApi {
  uint32_t major, minor;
  void *previous;
  void *managed_tensor_allocator, *managed_tensor_from_py, *managed_tensor_to_py;
  int (*tensor_from_py)(void *py_object, DlTensor *out);
  void *current_work_stream;
};

constexpr int32_t kDlCpu = 1;
constexpr uint8_t kDlInt = 0, kDlUint = 1, kDlFloat = 2, kDlBfloat = 4;

// Of a parameter, a gradient or a counter.
int32_t format_of(const DlTensor &t) {
  if (t.type_lanes != 1) return kNone;
  if (t.type_code == kDlFloat && t.type_bits == 32) return kFloat32;
  if (t.type_code == kDlBfloat && t.type_bits == 16) return kBFloat16;
  if (t.type_code == kDlFloat && t.type_bits == 16) return kFloat16;
  return kNone;
}

// Of a moment or a master.
int32_t state_format_of(const DlTensor &t) {
  if (t.type_lanes != 1) return kNone;
  if (t.type_code == kDlFloat && t.type_bits == 16) return kScaledFloat16;
  if (t.type_code == kDlUint && t.type_bits == 8) return kScaledFloat8;
  if (t.type_code == kDlInt && t.type_bits == 16) return kRemainder;
  return format_of(t);
}

uint64_t address_of(const DlTensor &t) { return (uint64_t)t.data + t.byte_offset; }

int64_t numel_of(const DlTensor &t) {
  int64_t n = 1;
  for (int d = 0; d < t.ndim; ++d) n *= t.shape[d];
  return n;
}

// Contiguous in this order of dimensions; other dense layouts are rarer and take the longer way.
bool is_contiguous(const DlTensor &t) {
  int64_t expected = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.shape[d] != 1 && t.strides[d] != expected) return false;
    expected *= t.shape[d];
  }
  return true;
}

bool same_shape_contiguous_and_place(const DlTensor &a, const DlTensor &b) {
  return a.ndim == b.ndim && a.device_type == b.device_type && a.device_index == b.device_index &&
         std::equal(a.shape, a.shape + a.ndim, b.shape) && is_contiguous(b);
}

struct Group {
  int32_t device_type, device_index;
  TableFormats formats;
  std::vector<TensorRow> rows;
  py::list indices;
};

class Gatherer {
 public:
  Gatherer(const DlExchangeApi *api, const py::tuple &types, const ExpectedStates &expected)
      : api_(api), types_(types), expected_(expected) {}

  // False: this one needs a closer look.
  bool take(PyObject *param, PyObject *grad, PyObject *state, int64_t index) {
    DlTensor p, g, m, v, master, step;
    if (!read(param, &p) || !read(grad, &g) || !PyDict_Check(state)) return false;
    if (!is_contiguous(p) || !same_shape_contiguous_and_place(p, g)) return false;
    TableFormats f{format_of(p), format_of(g), expected_.exp_avg, expected_.exp_avg_sq, kNone};
    // Remainders are of bfloat16 parameters; a float16 one has a whole master in their place.
    if (f.param == kFloat16 && expected_.master == kRemainder)
      f.master = kFloat32;
    else if (f.param != kFloat32)
      f.master = expected_.master;
    if (!is_number(f.param) || !is_number(f.grad)) return false;
    if (numel_of(p) == 1 && (is_negated(param) || is_negated(grad))) return false;
    if (!read_state(state, exp_avg_, p, f.exp_avg, &m) || !read_state(state, exp_avg_sq_, p, f.exp_avg_sq, &v))
      return false;
    if (f.master == kNone ? PyDict_Contains(state, master_.ptr()) != 0
                          : !read_state(state, master_, p, f.master, &master))
      return false;
    if (!read(PyDict_GetItem(state, step_.ptr()), &step) || format_of(step) != kFloat32 || numel_of(step) != 1 ||
        !step_place_is_right(step, p))
      return false;
    Group &group = group_for(p, f);
    group.rows.push_back({numel_of(p), address_of(p), address_of(g), address_of(m), address_of(v),
                          f.master == kNone ? 0 : address_of(master), address_of(step), 0});
    group.indices.append(index);
    return true;
  }

  py::list calls() {
    py::list calls;
    for (Group &g : groups_)
      calls.append(py::make_tuple(
          g.device_type, g.device_index,
          py::make_tuple(g.formats.param, g.formats.grad, g.formats.exp_avg, g.formats.exp_avg_sq, g.formats.master),
          py::bytes((const char *)g.rows.data(), g.rows.size() * sizeof(TensorRow)), g.indices));
    return calls;
  }

 private:
  bool read(PyObject *object, DlTensor *out) {
    if (!object) return false;
    const PyObject *type = (PyObject *)Py_TYPE(object);
    bool plain = false;
    for (py::handle t : types_) plain |= t.ptr() == type;
    if (!plain) return false;
    if (api_->tensor_from_py(object, out) != 0) {
      PyErr_Clear();  // no plain memory (meta, sparse, a conjugate view, ...)
      return false;
    }
    return true;
  }

  bool read_state(PyObject *state, const py::str &name, const DlTensor &param, int32_t format, DlTensor *out) {
    return read(PyDict_GetItem(state, name.ptr()), out) && state_format_of(*out) == format &&
           same_shape_contiguous_and_place(param, *out);
  }

  // torch negates lazily, and says nothing of it in DLPack: the imaginary part of a conjugate is a view
  // of the plain one with a flag. Such a view steps over the real parts, so only one element is contiguous.
  static bool is_negated(PyObject *tensor) {
    py::object negated = py::reinterpret_steal<py::object>(PyObject_CallMethod(tensor, "is_neg", nullptr));
    if (!negated) throw py::error_already_set();
    return negated.ptr() == Py_True;
  }

  static bool is_number(int32_t format) { return format == kFloat32 || format == kBFloat16 || format == kFloat16; }

  bool step_place_is_right(const DlTensor &step, const DlTensor &param) const {
    if (!expected_.step_on_device) return step.device_type == kDlCpu;
    return step.device_type == param.device_type && step.device_index == param.device_index;
  }

  Group &group_for(const DlTensor &p, const TableFormats &f) {
    for (Group &g : groups_)
      if (g.device_type == p.device_type && g.device_index == p.device_index && g.formats.param == f.param &&
          g.formats.grad == f.grad)  // the rest follows from the parameter's format
        return g;
    groups_.emplace_back();
    Group &made = groups_.back();
    made.device_type = p.device_type;
    made.device_index = p.device_index;
    made.formats = f;
    return made;
  }

  const DlExchangeApi *api_;
  const py::tuple &types_;
  const ExpectedStates &expected_;
  const py::str exp_avg_{"exp_avg"}, exp_avg_sq_{"exp_avg_sq"}, master_{"master_param"}, step_{"step"};
  std::vector<Group> groups_;
};

}  // namespace

py::tuple gather(const py::capsule &exchange, const py::list &params, const py::str &grad_name,
                 const py::object &states, const py::tuple &tensor_types, const ExpectedStates &expected) {
  if (!exchange.name() || std::strcmp(exchange.name(), "dlpack_exchange_api") != 0)
    throw std::invalid_argument("exchange must be the capsule torch.Tensor.__dlpack_c_exchange_api__");
  const auto *api = exchange.get_pointer<DlExchangeApi>();
  const bool usable = api->major == 1 && api->tensor_from_py;
  Gatherer gatherer(api, tensor_types, expected);
  std::unordered_set<PyObject *> taken;
  py::list left;
  for (Py_ssize_t i = 0; i < (Py_ssize_t)params.size(); ++i) {
    // Held: reading the gradient or the state may run Python code, which may change the list.
    const py::object held = params[i];
    PyObject *param = held.ptr();
    py::object grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, grad_name.ptr()));
    if (!grad) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
      PyErr_Clear();
      continue;
    }
    if (grad.is_none() || !taken.insert(param).second) continue;
    bool done = false;
    if (usable) {
      py::object state = py::reinterpret_steal<py::object>(PyObject_GetItem(states.ptr(), param));
      if (!state) throw py::error_already_set();
      done = gatherer.take(param, grad.ptr(), state.ptr(), i);
    }
    if (!done) left.append(i);
  }
  return py::make_tuple(gatherer.calls(), left);
}

}  // namespace statestream
