#include "gather.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
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

// The format of a tensor that has one of the roles; kNone where there is none.
int32_t format_of(const DlTensor &t, int32_t wanted = kParameter | kGradient) {
  if (t.type_lanes != 1) return kNone;
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles) \
  if (((roles) & wanted) && t.type_code == dlpack && t.type_bits == 8 * bytes) return name;
  STATESTREAM_FORMATS(STATESTREAM_ONE)
#undef STATESTREAM_ONE
  return kNone;
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
  std::vector<RowExtras> extras;
  py::list params;
  bool has_shards = false;
  py::list locals;  // of params, once one of them is a shard: until then they are their own
};

// Which objects of at most `count` came before, by identity.
class SeenObjects {
 public:
  explicit SeenObjects(size_t count) {
    size_t rooms = 16;
    while (rooms < 2 * count) rooms *= 2;
    table_.resize(rooms);
  }

  bool insert(PyObject *object) {
    size_t room = ((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u;
    for (;; ++room) {
      PyObject *&there = table_[room & (table_.size() - 1)];
      if (there == object) return false;
      if (!there) {
        there = object;
        return true;
      }
    }
  }

 private:
  std::vector<PyObject *> table_;
};

// A mapping's states, parameter by parameter. A tensor's hash is a call into Python; but states are made in the
// parameters' order, so that the next one in a dictionary mostly is the one that is asked for, and nothing is hashed.
class States {
 public:
  // `first`: how many parameters are before those that are asked for.
  States(const py::object &mapping, int64_t first)
      : mapping_(mapping),
        in_order_(PyDict_Check(mapping.ptr()) &&
                  py::type::of(mapping).attr("__getitem__").is(py::type::of(py::dict()).attr("__getitem__"))),
        place_((Py_ssize_t)std::max<int64_t>(first, 0)) {}

  // As mapping[param].
  py::object of(PyObject *param) {
    if (PyObject *state = next_if_of(param)) return py::reinterpret_borrow<py::object>(state);
    py::object state = py::reinterpret_steal<py::object>(PyObject_GetItem(mapping_.ptr(), param));
    if (!state) throw py::error_already_set();
    return state;
  }

  // A parameter that needs none: those of its followers are looked for behind its own.
  void pass(PyObject *param) { next_if_of(param); }

 private:
  // Other keys may lie between.
  static constexpr int kLookAhead = 4;

  PyObject *next_if_of(PyObject *param) {
    if (!in_order_) return nullptr;
    PyObject *key, *state;
    Py_ssize_t place = place_;
    for (int i = 0; i < kLookAhead && PyDict_Next(mapping_.ptr(), &place, &key, &state); ++i)
      if (key == param) {
        place_ = place;
        return state;
      }
    return nullptr;
  }

  const py::object &mapping_;
  const bool in_order_;
  Py_ssize_t place_;
};

py::str interned(const char *name) {
  py::str string = py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name));
  if (!string) throw py::error_already_set();
  return string;
}

py::object attribute(PyObject *object, const py::str &name) {
  py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name.ptr()));
  if (!value) throw py::error_already_set();
  return value;
}

bool are_equal(const py::object &a, const py::object &b) {
  const int equal = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal != 0;
}

class Gatherer {
 public:
  Gatherer(const DlExchangeApi *api, const TensorTypes &types, const ExpectedStates &expected)
      : api_(api), types_(types), expected_(expected) {
    for (const auto &[param, master] : expected.masters) {
      if (!has_role(param, kParameter)) throw std::invalid_argument("masters: a key is no format of a parameter");
      masters_[param] = master;
    }
  }

  // False: this one needs a closer look.
  bool take(const py::object &param, const py::object &grad, const py::object &state, int64_t ordinal) {
    if (!PyDict_Check(state.ptr())) return false;
    DlTensor p, g, m, v, master, step;
    py::object local, grad_local;
    if (!read(param, &p, &local) || !read(grad, &g, &grad_local)) return false;
    const bool sharded = local.ptr() != param.ptr();
    if (sharded != (Py_TYPE(grad.ptr()) == types_.sharded) || (sharded && !same_sharding(param, grad))) return false;
    if (!is_contiguous(p) || !same_shape_contiguous_and_place(p, g)) return false;
    TableFormats f{format_of(p), format_of(g), expected_.exp_avg, expected_.exp_avg_sq, kNone};
    f.master = masters_[f.param];
    if (!has_role(f.param, kParameter) || !has_role(f.grad, kGradient)) return false;
    if (numel_of(p) == 1 && (is_negated(local.ptr()) || is_negated(grad_local.ptr()))) return false;
    if (!read_state(found(state, exp_avg_), p, f.exp_avg, &m) ||
        !read_state(found(state, exp_avg_sq_), p, f.exp_avg_sq, &v))
      return false;
    if (f.master == kNone ? (bool)found(state, master_) : !read_state(found(state, master_), p, f.master, &master))
      return false;
    if (!read(found(state, step_), &step) || format_of(step) != kFloat32 || numel_of(step) != 1 ||
        !step_place_is_right(step, p))
      return false;
    RowExtras extras{0, 0, 0, ordinal, 0, 1, 1, 1, 0, 0, 0, 0};
    if (is_scaled(f.exp_avg) || is_scaled(f.exp_avg_sq) || is_scaled(f.master)) {
      PyObject *scales = PyDict_GetItem(types_.scales.ptr(), param.ptr());
      if (!scales || !PyDict_Check(scales) || !read_scale(scales, exp_avg_, f.exp_avg, p, &extras.exp_avg_scale) ||
          !read_scale(scales, exp_avg_sq_, f.exp_avg_sq, p, &extras.exp_avg_sq_scale) ||
          !read_scale(scales, master_, f.master, p, &extras.master_scale))
        return false;
    }
    Group &group = group_for(p, f);
    group.rows.push_back({numel_of(p), address_of(p), address_of(g), address_of(m), address_of(v),
                          f.master == kNone ? 0 : address_of(master), address_of(step), 0});
    if (expected_.extras) group.extras.push_back(extras);
    if (sharded && !group.has_shards) {
      group.has_shards = true;
      for (const py::handle whole : group.params) group.locals.append(whole);
    }
    if (group.has_shards) group.locals.append(local);
    group.params.append(param);
    return true;
  }

  py::list calls() {
    py::list calls;
    for (Group &g : groups_)
      calls.append(py::make_tuple(
          g.device_type, g.device_index,
          py::make_tuple(g.formats.param, g.formats.grad, g.formats.exp_avg, g.formats.exp_avg_sq, g.formats.master),
          py::bytes((const char *)g.rows.data(), g.rows.size() * sizeof(TensorRow)),
          py::bytes((const char *)g.extras.data(), g.extras.size() * sizeof(RowExtras)), g.params,
          g.has_shards ? g.locals : g.params));
    return calls;
  }

 private:
  static py::object found(const py::object &dict, const py::str &name) {
    return py::reinterpret_borrow<py::object>(PyDict_GetItem(dict.ptr(), name.ptr()));
  }

  bool is_plain(PyObject *object) const {
    for (py::handle t : types_.plain)
      if (t.ptr() == (PyObject *)Py_TYPE(object)) return true;
    return false;
  }

  // The memory of a plain tensor, or of a sharded one's local tensor if that is plain.
  bool read(const py::object &object, DlTensor *out, py::object *local = nullptr) {
    if (!object) return false;
    py::object plain = object;
    if (Py_TYPE(object.ptr()) == types_.sharded) plain = attribute(object.ptr(), local_tensor_);
    if (!is_plain(plain.ptr())) return false;
    if (api_->tensor_from_py(plain.ptr(), out) != 0) {
      PyErr_Clear();  // no plain memory (meta, sparse, a conjugate view, ...)
      return false;
    }
    if (numel_of(*out) && !address_of(*out)) return false;  // its memory was freed under it
    if (local) *local = std::move(plain);
    return true;
  }

  // A gradient that is cut otherwise, or is a sum still to be taken, has to be redistributed first.
  bool same_sharding(const py::object &param, const py::object &grad) {
    const py::object a = attribute(param.ptr(), spec_), b = attribute(grad.ptr(), spec_);
    if (a.is(b)) return true;
    // Equal meshes are often not one object: torch caches what it derives from them.
    return are_equal(attribute(a.ptr(), mesh_), attribute(b.ptr(), mesh_)) &&
           are_equal(attribute(a.ptr(), placements_), attribute(b.ptr(), placements_)) &&
           are_equal(attribute(a.ptr(), shape_), attribute(b.ptr(), shape_));
  }

  bool read_state(const py::object &state, const DlTensor &param, int32_t format, DlTensor *out) {
    return read(state, out) && format_of(*out, kState) == format && same_shape_contiguous_and_place(param, *out);
  }

  bool read_scale(PyObject *scales, const py::str &name, int32_t format, const DlTensor &param, uint64_t *address) {
    if (!is_scaled(format)) return true;
    DlTensor scale;
    if (!read(py::reinterpret_borrow<py::object>(PyDict_GetItem(scales, name.ptr())), &scale)) return false;
    *address = address_of(scale);
    return format_of(scale) == kFloat32 && numel_of(scale) == scale_blocks(numel_of(param)) && is_contiguous(scale) &&
           scale.device_type == param.device_type && scale.device_index == param.device_index;
  }

  // torch negates lazily, and says nothing of it in DLPack: the imaginary part of a conjugate is a view
  // of the plain one with a flag. Such a view steps over the real parts, so only one element is contiguous.
  static bool is_negated(PyObject *tensor) {
    py::object negated = py::reinterpret_steal<py::object>(PyObject_CallMethod(tensor, "is_neg", nullptr));
    if (!negated) throw py::error_already_set();
    return negated.ptr() == Py_True;
  }

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
  const TensorTypes &types_;
  const ExpectedStates &expected_;
  int32_t masters_[kFormatCodes] = {};  // by a parameter's format
  // Interned, as Python's own literals are: a dictionary then compares addresses.
  const py::str exp_avg_ = interned("exp_avg"), exp_avg_sq_ = interned("exp_avg_sq"),
                master_ = interned("master_param"), step_ = interned("step");
  const py::str local_tensor_ = interned("_local_tensor"), spec_ = interned("_spec"), mesh_ = interned("mesh"),
                placements_ = interned("placements"), shape_ = interned("shape");
  std::vector<Group> groups_;
};

}  // namespace

py::tuple gather(const py::capsule &exchange, const py::list &params, const py::str &grad_name,
                 const py::object &states, const TensorTypes &types, const ExpectedStates &expected,
                 int64_t first_ordinal) {
  if (!exchange.name() || std::strcmp(exchange.name(), "dlpack_exchange_api") != 0)
    throw std::invalid_argument("exchange must be the capsule torch.Tensor.__dlpack_c_exchange_api__");
  const auto *api = exchange.get_pointer<DlExchangeApi>();
  const bool usable = api->major == 1 && api->tensor_from_py;
  Gatherer gatherer(api, types, expected);
  const auto count = (Py_ssize_t)params.size();
  SeenObjects taken(count);
  States in_order(states, first_ordinal);
  py::list left;
  // Held and counted anew: reading a gradient or a state may run Python code, which may change the list.
  for (Py_ssize_t i = 0; i < count && i < (Py_ssize_t)params.size(); ++i) {
    const auto param = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(params.ptr(), i));
    const auto grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param.ptr(), grad_name.ptr()));
    if (!grad) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
      PyErr_Clear();
    }
    if (!grad || grad.is_none()) {
      in_order.pass(param.ptr());
      continue;
    }
    if (!taken.insert(param.ptr())) continue;
    if (!usable || !gatherer.take(param, grad, in_order.of(param.ptr()), first_ordinal + i)) left.append(i);
  }
  return py::make_tuple(gatherer.calls(), left);
}

}  // namespace statestream
