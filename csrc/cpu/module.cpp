// statestream._cpu: addresses, counts and codes in; statestream.kernels is its only caller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <optional>
#include <vector>

#include "../table_arguments.h"
#include "adam.h"
#include "gather.h"

namespace py = pybind11;
using namespace statestream;

namespace {

std::atomic<const Isa *> current_isa;

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa *isa : supported_isas()) names.push_back(isa->name);
  return names;
}

void use_isa(const std::string &name) {
  std::string known;
  for (const Isa *isa : supported_isas()) {
    if (isa->name == name) return current_isa.store(isa);
    known += (known.empty() ? "" : ", ") + std::string(isa->name);
  }
  throw std::invalid_argument("'" + name + "' is not an instruction set that this processor runs; choose from " +
                              known);
}

int checked_threads(int threads) {
  if (threads < 1 || threads > 4096) throw std::invalid_argument("threads must be from 1 to 4096");
  return threads;
}

template <class Function>
Function known(Function function) {
  if (!function) throw std::invalid_argument("no CPU kernel for these formats");
  return function;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of statestream; use statestream.kernels";
  m.attr("FORMATS") = format_table();
  current_isa = supported_isas().front();

  m.def("isas", isa_names, "Instruction sets that the kernels have and this processor runs, best first.");
  m.def("isa", [] { return current_isa.load()->name; });
  m.def("use_isa", use_isa, py::arg("name"));

  m.def("has_adam", [](const py::tuple &formats) { return has_kernel(formats_from(formats)); }, py::arg("formats"));

  m.def(
      "adam",
      [](const py::buffer &rows, const py::tuple &formats, double lr, double beta1, double beta2, double eps,
         double weight_decay, bool decoupled, bool bias_correction, bool maximize, double grad_scale, bool advance,
         int threads, const std::optional<py::buffer> &extras, uint64_t seed, int32_t stochastic) {
        const py::buffer_info info = rows.request();
        Table table = table_from(info, formats_from(formats));
        if (!has_kernel(table.formats)) throw std::invalid_argument("no CPU kernel for these formats");
        const py::buffer_info extras_info = extras ? extras->request() : py::buffer_info();
        if (extras) add_extras(table, extras_info);
        check_stochastic(table, stochastic);
        checked_threads(threads);
        const Isa &isa = *current_isa.load();
        const AdamOptions options{lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, maximize};
        py::gil_scoped_release nogil;
        if (advance) advance_host_steps(table.rows, table.n);
        adam(isa, table.formats, table.rows, table.n, options, grad_scale, threads, {table.extras, seed, stochastic});
      },
      py::arg("rows"), py::arg("formats"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
      py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"), py::arg("bias_correction"), py::arg("maximize"),
      py::arg("grad_scale"), py::arg("advance"), py::arg("threads"), py::arg("extras") = py::none(),
      py::arg("seed") = 0, py::arg("stochastic") = 0,
      "One update of every row; advance: add one to each row's step counter first.\n\n"
      "extras: twelve words a row (tensor_table.h), for scaled formats and stochastic. stochastic: 1 exp_avg, 2\n"
      "exp_avg_sq, 4 param, rounded by random bits of the seed.");

  m.def(
      "decode",
      [](int32_t format, uint64_t from, uint64_t to, int64_t n, int threads, uint64_t scale, bool root) {
        const Isa &isa = *current_isa.load();
        known(isa.decode(format, root));
        check_slice(from, format_bytes(format), to, 4, n);
        check_scale(0, "scale", format, scale, n);
        checked_threads(threads);
        py::gil_scoped_release nogil;
        decode(isa, format, (const void *)from, (float *)to, n, threads, (const float *)scale, root);
      },
      py::arg("format"), py::arg("source"), py::arg("destination"), py::arg("n"), py::arg("threads"),
      py::arg("scale") = 0, py::arg("root") = false,
      "n elements of a state to FP32. Of a scaled format they start a block, whose scale is at `scale`; with root the\n"
      "state is of square roots.");

  m.def(
      "encode",
      [](int32_t format, uint64_t from, uint64_t to, int64_t n, int threads, uint64_t scale, bool root) {
        const Isa &isa = *current_isa.load();
        known(isa.encode(format, root));
        check_slice(from, 4, to, format_bytes(format), n);
        check_scale(0, "scale", format, scale, n);
        checked_threads(threads);
        py::gil_scoped_release nogil;
        encode(isa, format, (const float *)from, (void *)to, n, threads, (float *)scale, root);
      },
      py::arg("format"), py::arg("source"), py::arg("destination"), py::arg("n"), py::arg("threads"),
      py::arg("scale") = 0, py::arg("root") = false,
      "n elements of a state from FP32, to nearest; scales are written.");

  m.def(
      "refresh_master",
      [](uint64_t weight, uint64_t master, int64_t n, int threads, int32_t param_format, int32_t master_format,
         uint64_t scale) {
        const Isa &isa = *current_isa.load();
        known(isa.refresh(param_format, master_format));
        check_slice(weight, format_bytes(param_format), master, format_bytes(master_format), n);
        check_scale(0, "scale", master_format, scale, n);
        checked_threads(threads);
        py::gil_scoped_release nogil;
        refresh_master(isa, (const void *)weight, (void *)master, n, threads, param_format, master_format,
                       (float *)scale);
      },
      py::arg("weight"), py::arg("master"), py::arg("n"), py::arg("threads"),
      py::arg("param_format") = (int32_t)kBFloat16, py::arg("master_format") = (int32_t)kFloat32, py::arg("scale") = 0,
      "Sets the master to the weight where it does not round to it.");

  m.def(
      "gather",
      [](const py::capsule &exchange, const py::list &params, const py::str &grad_name, const py::object &states,
         const py::tuple &plain_types, const py::object &sharded_type, const py::dict &scales, int32_t exp_avg,
         int32_t exp_avg_sq, const std::map<int32_t, int32_t> &masters, bool step_on_device, bool extras,
         int64_t first_ordinal) {
        if (!sharded_type.is_none() && !PyType_Check(sharded_type.ptr()))
          throw py::type_error("sharded_type: expected a class or None");
        auto *sharded = sharded_type.is_none() ? nullptr : (PyTypeObject *)sharded_type.ptr();
        return gather(exchange, params, grad_name, states, {plain_types, sharded, scales},
                      {exp_avg, exp_avg_sq, masters, step_on_device, extras}, first_ordinal);
      },
      py::arg("exchange"), py::arg("params"), py::arg("grad_name"), py::arg("states"), py::arg("plain_types"),
      py::kw_only(), py::arg("sharded_type"), py::arg("scales"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
      py::arg("masters"), py::arg("step_on_device"), py::arg("extras"), py::arg("first_ordinal"),
      "Rows of the parameters whose memory can be read at once; see gather.h.");
}
