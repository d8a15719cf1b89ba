// statestream._cuda: addresses, counts, codes and a stream in; statestream.kernels is its only caller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "../table_arguments.h"
#include "adam.h"

namespace py = pybind11;
using namespace statestream;

namespace {

void check_formats(bool known) {
  if (!known) throw std::invalid_argument("no CUDA kernel for these formats");
}

Place place_of(int device, uint64_t stream) { return {device, (void *)stream}; }

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of statestream; use statestream.kernels";
  m.attr("SCRATCH_BYTES") = kScratchBytes;
  m.attr("ARCHS") = STATESTREAM_CUDA_ARCHS;
  m.attr("FORMATS") = format_table();

  m.def("why_not", why_not, py::arg("device"),
        "Why the kernels cannot run on the current device; empty where they can.");

  m.def("has_adam", [](const py::tuple &formats) { return has_kernel(formats_from(formats)); }, py::arg("formats"));

  m.def(
      "adam",
      [](const py::buffer &rows, const py::tuple &formats, double lr, double beta1, double beta2, double eps,
         double weight_decay, bool decoupled, bool bias_correction, bool maximize, double grad_scale, bool advance,
         int device, uint64_t stream, bool capturable, uint64_t lr_address, uint64_t grad_scale_address,
         uint64_t found_inf_address, uint64_t scratch_address, const std::optional<py::buffer> &extras, uint64_t seed,
         int32_t stochastic) {
        const py::buffer_info info = rows.request();
        Table table = table_from(info, formats_from(formats));
        check_formats(has_kernel(table.formats));
        const py::buffer_info extras_info = extras ? extras->request() : py::buffer_info();
        if (extras) add_extras(table, extras_info);
        check_stochastic(table, stochastic);
        check_address(0, "lr", lr_address, 1, 4 * (lr_address != 0));
        check_address(0, "grad_scale", grad_scale_address, 1, 4 * (grad_scale_address != 0));
        check_address(0, "found_inf", found_inf_address, 1, 4 * (found_inf_address != 0));
        if (!capturable && (lr_address || grad_scale_address || found_inf_address || scratch_address))
          throw std::invalid_argument("addresses of scalars are for capturable calls");
        if (capturable) check_address(0, "scratch", scratch_address, table.n, 4);
        const AdamOptions options{lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, maximize};
        const Place place = place_of(device, stream);
        const CallExtras call{table.extras, seed, stochastic};
        py::gil_scoped_release nogil;
        if (capturable)
          adam_capturable(table.formats, table.rows, table.n, options, grad_scale, advance,
                          {lr_address, grad_scale_address, found_inf_address, scratch_address}, place, call);
        else
          adam(table.formats, table.rows, table.n, options, grad_scale, advance, place, call);
      },
      py::arg("rows"), py::arg("formats"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
      py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"), py::arg("bias_correction"), py::arg("maximize"),
      py::arg("grad_scale"), py::arg("advance"), py::arg("device"), py::arg("stream"), py::arg("capturable") = false,
      py::arg("lr_address") = 0, py::arg("grad_scale_address") = 0, py::arg("found_inf_address") = 0,
      py::arg("scratch_address") = 0, py::arg("extras") = py::none(), py::arg("seed") = 0, py::arg("stochastic") = 0,
      "One update of every row, queued on a stream; advance: add one to each row's step counter first.\n\n"
      "Step counters are in host memory, or with capturable on the device; then lr, grad_scale and found_inf may be\n"
      "addresses of float32 on the device, and scratch has SCRATCH_BYTES a row there. extras, in host memory: twelve\n"
      "words a row (tensor_table.h), for scaled formats and stochastic. stochastic: 1 exp_avg, 2 exp_avg_sq, 4 param,\n"
      "rounded by random bits of the seed.");

  m.def(
      "advance_steps",
      [](const py::buffer &counters, int device, uint64_t stream, uint64_t found_inf_address) {
        const py::buffer_info info = counters.request();
        if (!holds_words(info)) throw std::invalid_argument("counters must be a contiguous buffer of 64-bit integers");
        const auto *addresses = static_cast<const uint64_t *>(info.ptr);
        for (int64_t i = 0; i < info.size; ++i) check_address(i, "step", addresses[i], 1, 4);
        check_address(0, "found_inf", found_inf_address, 1, 4 * (found_inf_address != 0));
        const int64_t n = info.size;
        const Place place = place_of(device, stream);
        py::gil_scoped_release nogil;
        advance_steps(addresses, n, found_inf_address, place);
      },
      py::arg("counters"), py::kw_only(), py::arg("device"), py::arg("stream"), py::arg("found_inf_address") = 0,
      "Adds one to each float32 counter on the device, unless found_inf.");

  m.def(
      "decode",
      [](int32_t format, uint64_t from, uint64_t to, int64_t n, int device, uint64_t stream, uint64_t scale,
         bool root) {
        check_formats(has_format(format, root));
        check_slice(from, format_bytes(format), to, 4, n);
        check_scale(0, "scale", format, scale, n);
        const Place place = place_of(device, stream);
        py::gil_scoped_release nogil;
        decode(format, (const void *)from, (float *)to, n, place, scale, root);
      },
      py::arg("format"), py::arg("source"), py::arg("destination"), py::arg("n"), py::kw_only(), py::arg("device"),
      py::arg("stream"), py::arg("scale") = 0, py::arg("root") = false,
      "n elements of a state to FP32. Of a scaled format they start a block, whose scale is at `scale`; with root the\n"
      "state is of square roots.");

  m.def(
      "encode",
      [](int32_t format, uint64_t from, uint64_t to, int64_t n, int device, uint64_t stream, uint64_t scale,
         bool root) {
        check_formats(has_format(format, root));
        check_slice(from, 4, to, format_bytes(format), n);
        check_scale(0, "scale", format, scale, n);
        const Place place = place_of(device, stream);
        py::gil_scoped_release nogil;
        encode(format, (const float *)from, (void *)to, n, place, scale, root);
      },
      py::arg("format"), py::arg("source"), py::arg("destination"), py::arg("n"), py::kw_only(), py::arg("device"),
      py::arg("stream"), py::arg("scale") = 0, py::arg("root") = false,
      "n elements of a state from FP32, to nearest; scales are written.");

  m.def(
      "refresh_master",
      [](uint64_t weight, uint64_t master, int64_t n, int device, uint64_t stream, int32_t param_format,
         int32_t master_format, uint64_t scale) {
        check_formats(has_master(param_format, master_format));
        check_slice(weight, format_bytes(param_format), master, format_bytes(master_format), n);
        check_scale(0, "scale", master_format, scale, n);
        const Place place = place_of(device, stream);
        py::gil_scoped_release nogil;
        refresh_master((const void *)weight, (void *)master, n, place, param_format, master_format, scale);
      },
      py::arg("weight"), py::arg("master"), py::arg("n"), py::kw_only(), py::arg("device"), py::arg("stream"),
      py::arg("param_format") = (int32_t)kBFloat16, py::arg("master_format") = (int32_t)kFloat32, py::arg("scale") = 0,
      "Sets the master to the weight where it does not round to it.");
}
