#include "adam_case.h"

#include <stdexcept>

#include "../../csrc/cpu/adam.h"

using namespace statestream;

namespace {

// A block's piece of a tensor (csrc/cuda/adam_kernel.cuh), and the CPU's.
constexpr int64_t kPiece = 8192;

std::vector<int64_t> lengths_of(const std::string &name, Random &random) {
  std::vector<int64_t> lengths;
  if (name == "short") {
    for (int64_t n = 0; n <= 130; ++n) lengths.push_back(n);
    for (int64_t i = 0; i < 40; ++i) lengths.insert(lengths.begin() + i * 3, 0);
  } else if (name == "blocks") {
    for (int64_t n : {1, 2, 3, 5})
      for (int64_t d : {-9, -8, -1, 0, 1, 7, 8, 130}) lengths.push_back(n * kScaleBlock + d);
  } else if (name == "pieces") {
    for (int64_t n : {kPiece, 2 * kPiece})
      for (int64_t d : {-9, -1, 0, 1, 8}) lengths.push_back(n + d);
  } else if (name == "chunk") {
    for (int64_t n : {kPiece, 2 * kPiece, kChunkElements})
      for (int64_t d : {-9, -8, -1, 0, 1, 7, 8, 9}) lengths.push_back(n + d);
  } else if (name == "many") {  // more than two launches hold, and more step counts than one does
    for (int i = 0; i < 1300; ++i) lengths.push_back((int64_t)(random.next() % 40));
  } else if (name == "empty") {
    lengths.assign(700, 0);
  } else {
    throw std::invalid_argument("lengths: " + name);
  }
  return lengths;
}

struct Kind {
  Role role;
  int32_t TableFormats::*format;
  uint64_t TensorRow::*address;
};
constexpr Kind kKinds[] = {
    {Role::kWeight, &TableFormats::param, &TensorRow::param},
    {Role::kGrad, &TableFormats::grad, &TensorRow::grad},
    {Role::kExpAvg, &TableFormats::exp_avg, &TensorRow::exp_avg},
    {Role::kExpAvgSq, &TableFormats::exp_avg_sq, &TensorRow::exp_avg_sq},
    {Role::kMaster, &TableFormats::master, &TensorRow::master},
};
struct ScaleKind {
  int32_t TableFormats::*format;
  uint64_t RowExtras::*address;
};
constexpr ScaleKind kScales[] = {
    {&TableFormats::exp_avg, &RowExtras::exp_avg_scale},
    {&TableFormats::exp_avg_sq, &RowExtras::exp_avg_sq_scale},
    {&TableFormats::master, &RowExtras::master_scale},
};
constexpr const char *kNames[] = {"param", "grad",          "exp_avg",          "exp_avg_sq",  "master",
                                  "step",  "exp_avg_scale", "exp_avg_sq_scale", "master_scale"};
constexpr size_t kStreams = 9;

// Elements between a 64-byte boundary and a tensor's first.
int64_t offset_of(const std::string &name, int64_t tensor, int kind, Random &random) {
  if (name == "aligned") return 0;
  if (name == "together") return tensor % 17;
  if (name == "varied") return (int64_t)(random.next() % 17);
  if (name == "apart") return kind == 1 ? 3 : 0;  // no element at which all are aligned
  throw std::invalid_argument("offsets: " + name);
}

// The map of tensor i: sizes of levels, strides and an offset.
RowExtras map_of(const std::string &name, int64_t i, bool scaled) {
  RowExtras e{};
  e.ordinal = (int64_t)(i * 2654435761u % UINT32_MAX);
  e.size0 = e.size1 = e.stride0 = 1;
  if (name == "whole") return e;
  e.first = i % 5 * (scaled ? kScaleBlock : 77);
  e.offset = i % 3 * ((int64_t{1} << 34) + 1001);
  if (name == "offset") {
    e.offset += i % 8;
  } else if (name == "columns") {
    e.size1 = 5 + i % 40;
    e.stride0 = 64;
    e.stride2 = 1;
  } else if (name == "middle") {
    e.size0 = 24;
    e.stride0 = 100;
    e.stride1 = 1;
  } else if (name == "experts") {
    e.size0 = 3;
    e.size1 = 8 + i % 9;
    e.stride0 = 4096;
    e.stride1 = 40;
    e.stride2 = 1;
  } else if (name == "transposed") {
    e.size1 = 4;
    e.stride2 = 64;
  } else {
    throw std::invalid_argument("map: " + name);
  }
  return e;
}

// Of the flags, those that the formats take.
int32_t flags_of(const TableFormats &f, int32_t flags) {
  int32_t taken = 0;
  for (int32_t flag : {1, 2, 4})
    if (flags & flag && takes_stochastic(f, flag)) taken |= flag;
  return taken;
}

struct Tensors {
  std::vector<TensorRow> rows;
  std::vector<RowExtras> extras;
  std::vector<Guarded> memory;  // kStreams a row
};

Tensors make(const AdamCase &c) {
  Random random(c.seed);
  Tensors t;
  const auto lengths = lengths_of(c.lengths, random);
  for (size_t i = 0; i < lengths.size(); ++i) {
    TensorRow row{};
    row.numel = lengths[i];
    for (int k = 0; k < 5; ++k) {
      const int32_t format = c.formats.*kKinds[k].format;
      const int64_t bytes = format_bytes(format);
      t.memory.emplace_back(row.numel * bytes, offset_of(c.offsets, (int64_t)i, k, random) * bytes);
      const Guarded &memory = t.memory.back();
      if (format == kNone) continue;
      fill(memory.data(), row.numel, format, kKinds[k].role, c.values, random);
      row.*kKinds[k].address = memory.address();
    }
    t.memory.emplace_back(4, 0);
    const float step = c.steps == "same" ? 3.0f : (float)(i * 7 % 250);
    memcpy(t.memory.back().data(), &step, 4);
    row.step = t.memory.back().address();
    RowExtras extras = map_of(c.map, (int64_t)i, needs_extras(c.formats, 0));
    for (const ScaleKind &kind : kScales) {
      const int32_t format = c.formats.*kind.format;
      const int64_t scales = is_scaled(format) ? scale_blocks(row.numel) : 0;
      t.memory.emplace_back(4 * scales, (int64_t)(i % 3) * 4);
      if (!is_scaled(format)) continue;
      fill_scales(t.memory.back().data(), scales, format, c.values, random);
      extras.*kind.address = t.memory.back().address();
    }
    t.rows.push_back(row);
    t.extras.push_back(extras);
  }
  return t;
}

std::string differences(const Tensors &got, const Tensors &want) {
  for (size_t i = 0; i < got.memory.size(); ++i) {
    const Guarded &a = got.memory[i], &b = want.memory[i];
    const size_t row = i / kStreams;
    const std::string where =
        "row " + std::to_string(row) + " of " + std::to_string(got.rows[row].numel) + ", " + kNames[i % kStreams];
    if (!a.untouched_before()) return where + ": bytes before it were written";
    for (size_t k = 0; k < a.bytes(); ++k)
      if (a.data()[k] != b.data()[k]) return where + ": byte " + std::to_string(k) + " differs";
  }
  return "";
}

}  // namespace

std::string run(const AdamCase &c) {
  const Tensors got = make(c), want = make(c);
  const int64_t n = (int64_t)got.rows.size();
  const double beta1 = c.betas == "first" ? 0.25 : 0.9, beta2 = c.betas == "second" ? 0.0 : 0.999;
  AdamOptions options{1e-3, beta1, beta2, 1e-8, 0.01, !c.l2, c.bias_correction, c.maximize};
  double grad_scale = c.grad_scale;
  const int32_t flags = flags_of(c.formats, c.stochastic);
  const bool more = needs_extras(c.formats, flags);
  const auto extras = [&](const Tensors &t) {
    return CallExtras{more ? t.extras.data() : nullptr, c.seed * 0x9e3779b97f4a7c15u, flags};
  };

  if (c.capturable) {
    // Scalars that are exact in float32, so that the reference can have them as options.
    Guarded lr(4, 4), factor(4, 0), found_inf(4, 8), scratch(n * kScratchBytes, 4);
    const float values[] = {0.0625f, 8.0f, c.skip ? 1.0f : 0.0f};
    memcpy(lr.data(), &values[0], 4);
    memcpy(factor.data(), &values[1], 4);
    memcpy(found_inf.data(), &values[2], 4);
    DeviceScalars scalars{0, 0, found_inf.address(), scratch.address()};
    if (c.scalars_on_device) {
      scalars.lr = lr.address();
      scalars.grad_scale = factor.address();
    }
    adam_capturable(c.formats, got.rows.data(), n, options, grad_scale, c.advance, scalars, {0, nullptr}, extras(got));
    if (c.scalars_on_device) {
      options.lr = values[0];
      grad_scale *= values[1];
    }
  } else {
    adam(c.formats, got.rows.data(), n, options, grad_scale, c.advance, {0, nullptr}, extras(got));
  }

  if (!(c.capturable && c.skip)) {
    if (c.advance)
      for (const TensorRow &row : want.rows) *(float *)row.step += 1.0f;
    adam(kPortableIsa, c.formats, want.rows.data(), n, options, grad_scale, 1, extras(want));
  }
  return differences(got, want);
}
