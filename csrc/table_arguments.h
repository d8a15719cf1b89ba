// What both modules check of a table that Python hands over, before any address in it is used.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "adam_rule.h"
#include "tensor_table.h"

namespace statestream {

// The table of formats, for Python to compare with its own.
inline pybind11::tuple format_table() {
  pybind11::list rows;
  const auto add = [&](const char *name, int32_t code, int64_t bytes, bool scaled, int32_t roles) {
    rows.append(pybind11::make_tuple(name, code, bytes, scaled, bool(roles & kParameter), bool(roles & kGradient),
                                     bool(roles & kMoment), bool(roles & kMaster)));
  };
#define STATESTREAM_ONE(name, code, dlpack, bytes, scaled, roles) add(#name, code, bytes, scaled, roles);
  STATESTREAM_FORMATS(STATESTREAM_ONE)
#undef STATESTREAM_ONE
  return rows;
}

struct Table {
  TableFormats formats;
  const TensorRow *rows;
  int64_t n;
  const RowExtras *extras;  // null where there are none
};

inline std::string row_error(int64_t i, const char *what, const std::string &why) {
  return "row " + std::to_string(i) + ": " + what + " " + why;
}

// Five-level page tables end here. It bounds a tensor's bytes and not its address, which may carry a tag on top.
constexpr uint64_t kAddressSpaceBytes = (uint64_t)1 << 57;

// `bytes` an element: a power of two, or 0 of what is not there.
inline void check_address(int64_t row, const char *what, uint64_t address, int64_t numel, int64_t bytes) {
  if (!bytes || !numel) return;
  if (!address) throw std::invalid_argument(row_error(row, what, "is a null address"));
  if (address & (uint64_t)(bytes - 1))
    throw std::invalid_argument(row_error(row, what, "is not aligned to its " + std::to_string(bytes) + " bytes"));
  // The first comparison keeps the product of the second from overflowing.
  if ((uint64_t)numel > kAddressSpaceBytes ||
      (uint64_t)numel * (uint64_t)bytes > std::min(kAddressSpaceBytes, UINT64_MAX - address))
    throw std::invalid_argument(row_error(row, what, "runs past the end of the address space"));
}

inline void check_slice(uint64_t from, int64_t from_bytes, uint64_t to, int64_t to_bytes, int64_t n) {
  if (n < 0) throw std::invalid_argument("n is negative");
  check_address(0, "source", from, n, from_bytes);
  check_address(0, "destination", to, n, to_bytes);
}

// An empty buffer may be anywhere: nothing is read there.
inline bool holds_words(const pybind11::buffer_info &buffer) {
  return buffer.itemsize == 8 && buffer.ndim == 1 && buffer.strides[0] == 8 && buffer.format.size() == 1 &&
         std::string("qQlL").find(buffer.format) != std::string::npos &&
         (!buffer.size || (uint64_t)buffer.ptr % 8 == 0);
}

// `rows` must outlive the table; it is eight int64 a row (tensor_table.h).
inline Table table_from(const pybind11::buffer_info &rows, const TableFormats &formats) {
  if (!holds_words(rows) || rows.size % 8)
    throw std::invalid_argument("rows must be a contiguous buffer of 64-bit integers, eight a row");
  Table table{formats, static_cast<const TensorRow *>(rows.ptr), (int64_t)rows.size / 8, nullptr};
  for (int64_t i = 0; i < table.n; ++i) {
    const TensorRow &r = table.rows[i];
    if (r.numel < 0) throw std::invalid_argument(row_error(i, "numel", "is negative"));
    check_address(i, "param", r.param, r.numel, format_bytes(formats.param));
    check_address(i, "grad", r.grad, r.numel, format_bytes(formats.grad));
    check_address(i, "exp_avg", r.exp_avg, r.numel, format_bytes(formats.exp_avg));
    check_address(i, "exp_avg_sq", r.exp_avg_sq, r.numel, format_bytes(formats.exp_avg_sq));
    check_address(i, "master_param", r.master, r.numel, format_bytes(formats.master));
    check_address(i, "step", r.step, 1, 4);
  }
  return table;
}

inline void check_scale(int64_t row, const char *what, int32_t format, uint64_t address, int64_t numel) {
  check_address(row, what, address, scale_blocks(numel), is_scaled(format) ? 4 : 0);
}

// Joins the second table, twelve int64 a row; `extras` must outlive it.
inline void add_extras(Table &table, const pybind11::buffer_info &extras) {
  if (!holds_words(extras) || extras.size != 12 * table.n)
    throw std::invalid_argument("extras must be a contiguous buffer of 64-bit integers, twelve for each of " +
                                std::to_string(table.n) + " rows");
  const TableFormats &f = table.formats;
  table.extras = static_cast<const RowExtras *>(extras.ptr);
  for (int64_t i = 0; i < table.n; ++i) {
    const RowExtras &e = table.extras[i];
    const int64_t numel = table.rows[i].numel;
    check_scale(i, "exp_avg_scale", f.exp_avg, e.exp_avg_scale, numel);
    check_scale(i, "exp_avg_sq_scale", f.exp_avg_sq, e.exp_avg_sq_scale, numel);
    check_scale(i, "master_scale", f.master, e.master_scale, numel);
    if (e.ordinal < 0 || e.ordinal > UINT32_MAX)
      throw std::invalid_argument(row_error(i, "ordinal", "is not of 32 bits"));
    if (e.first < 0 || e.first > INT64_MAX - numel)
      throw std::invalid_argument(row_error(i, "first", "is negative, or too large"));
    if (needs_extras(f, 0) && e.first % kScaleBlock)
      throw std::invalid_argument(
          row_error(i, "first", "is not a multiple of 256, where a block of scaled numbers starts"));
    if (e.size0 < 1 || e.size1 < 1) throw std::invalid_argument(row_error(i, "sizes", "must be 1 or more"));
  }
}

inline void check_stochastic(const Table &table, int32_t flags) {
  if (!takes_stochastic(table.formats, flags))
    throw std::invalid_argument(
        "stochastic must be flags of 1 (exp_avg), 2 (exp_avg_sq) and 4 (param), each of a tensor that is stored as "
        "bfloat16 or scaled, a param without master");
  if (needs_extras(table.formats, flags) && !table.extras)
    throw std::invalid_argument("these formats, or stochastic, need extras: scales and indices of each row");
}

inline TableFormats formats_from(const pybind11::tuple &codes) {
  if (codes.size() != 5)
    throw std::invalid_argument("formats must be five codes: param, grad, exp_avg, exp_avg_sq, master_param");
  try {
    return {codes[0].cast<int32_t>(), codes[1].cast<int32_t>(), codes[2].cast<int32_t>(), codes[3].cast<int32_t>(),
            codes[4].cast<int32_t>()};
  } catch (const pybind11::cast_error &) {
    throw std::invalid_argument("formats must be five integers of 32 bits");
  }
}

}  // namespace statestream
