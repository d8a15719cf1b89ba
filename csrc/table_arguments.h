// What both modules check of a table that Python hands over, before any address in it is used.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "adam_rule.h"
#include "tensor_table.h"

namespace statestream {

struct Table {
  TableFormats formats;
  const TensorRow *rows;
  int64_t n;
};

inline std::string row_error(int64_t i, const char *what, const std::string &why) {
  return "row " + std::to_string(i) + ": " + what + " " + why;
}

// Five-level page tables end here. It bounds a tensor's bytes and not its address, which may carry a tag on top.
constexpr uint64_t kAddressSpaceBytes = (uint64_t)1 << 57;

inline void check_address(int64_t row, const char *what, uint64_t address, int64_t numel, int64_t bytes) {
  if (!bytes || !numel) return;
  if (!address) throw std::invalid_argument(row_error(row, what, "is a null address"));
  if (address % (uint64_t)bytes)
    throw std::invalid_argument(row_error(row, what, "is not aligned to its " + std::to_string(bytes) + " bytes"));
  if ((uint64_t)numel > std::min(kAddressSpaceBytes, UINT64_MAX - address) / (uint64_t)bytes)
    throw std::invalid_argument(row_error(row, what, "runs past the end of the address space"));
}

inline bool holds_words(const pybind11::buffer_info &buffer) {
  return buffer.itemsize == 8 && buffer.ndim == 1 && buffer.strides[0] == 8 && buffer.format.size() == 1 &&
         std::string("qQlL").find(buffer.format) != std::string::npos;
}

// `rows` must outlive the table; it is eight int64 a row (tensor_table.h).
inline Table table_from(const pybind11::buffer_info &rows, const TableFormats &formats) {
  if (!holds_words(rows) || rows.size % 8)
    throw std::invalid_argument("rows must be a contiguous buffer of 64-bit integers, eight a row");
  Table table{formats, static_cast<const TensorRow *>(rows.ptr), (int64_t)rows.size / 8};
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

inline TableFormats formats_from(const pybind11::tuple &codes) {
  if (codes.size() != 5)
    throw std::invalid_argument("formats must be five codes: param, grad, exp_avg, exp_avg_sq, master_param");
  return {codes[0].cast<int32_t>(), codes[1].cast<int32_t>(), codes[2].cast<int32_t>(), codes[3].cast<int32_t>(),
          codes[4].cast<int32_t>()};
}

}  // namespace statestream
