#include "convert_case.h"

#include <vector>

#include "../../csrc/cpu/adam.h"
#include "../../csrc/cuda/adam.h"
#include "guarded.h"

using namespace statestream;

namespace {

// Masters that round to the weight, and others that do not: by the format of the weight, and whole blocks
// that all do.
void make_masters(const ConvertCase &c, const uint8_t *weights, uint8_t *masters, int64_t n, Random &random) {
  uint64_t block = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i % kScaleBlock == 0) block = random.next();
    uint16_t weight;
    memcpy(&weight, weights + 2 * i, 2);
    uint32_t bits = c.param_format == kBFloat16 ? (uint32_t)weight << 16 : bits_of(float16_load(weight));
    const uint64_t choice = block % 2 ? random.next() % 4 : 2;
    if (choice == 0) bits |= (uint32_t)random.next() & (c.param_format == kBFloat16 ? 0x7fffu : 0xfffu);
    if (choice == 1) bits ^= (uint32_t)random.next();
    if (c.format == kFloat32) {
      memcpy(masters + 4 * i, &bits, 4);
    } else {  // under the scales of fill_scales, a weight is its own master
      const auto payload = (uint16_t)payload_store<Float16Payload, false>(float_of(bits), 1024.0f, 0);
      memcpy(masters + 2 * i, &payload, 2);
    }
  }
}

std::string difference(const char *what, const Guarded &got, const std::vector<uint8_t> &want) {
  if (!got.untouched_before()) return std::string("bytes before the ") + what + " were written";
  for (size_t k = 0; k < got.bytes(); ++k)
    if (got.data()[k] != want[k]) return std::string(what) + " byte " + std::to_string(k) + " differs";
  return "";
}

std::vector<uint8_t> copy_of(const Guarded &memory) {
  std::vector<uint8_t> copy(memory.data(), memory.data() + memory.bytes());
  copy.reserve(1);  // an address even for no elements
  return copy;
}

}  // namespace

std::string run_convert(const ConvertCase &c) {
  Random random(c.seed);
  // Where lanes meet a launch takes long, and a lane's eight elements are all the cases there are.
  const bool meets = is_scaled(c.format) || c.param_format == kFloat16;
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n <= (meets ? 18 : 130); ++n) lengths.push_back(n);
  for (int64_t n : {255, 256, 257, 1023, 1024, 1025, 5000}) lengths.push_back(n);
  if (!meets) lengths.push_back(70001);
  const bool refresh = c.what == "refresh_master", decoding = c.what == "decode";
  const int32_t from_format = refresh ? c.param_format : decoding ? c.format : (int32_t)kFloat32;
  const int32_t to_format = decoding ? (int32_t)kFloat32 : c.format;
  const int64_t from_bytes = format_bytes(from_format), to_bytes = format_bytes(to_format);
  for (int64_t n : lengths) {
    const int64_t scales = is_scaled(c.format) ? scale_blocks(n) : 0;
    const Guarded from(n * from_bytes, c.from_offset * from_bytes);
    const Guarded to(n * to_bytes, c.to_offset * to_bytes);
    const Guarded scale(4 * scales, 4 * c.to_offset);
    fill(from.data(), n, from_format, Role::kWeight, c.values, random);
    fill_scales(scale.data(), scales, c.format, refresh ? Values::kOrdinary : c.values, random);
    if (refresh)
      make_masters(c, from.data(), to.data(), n, random);
    else
      fill(to.data(), n, to_format, Role::kWeight, Values::kAnyBits, random);
    std::vector<uint8_t> want = copy_of(to), want_scale = copy_of(scale);
    const Place place{0, nullptr};
    auto *scale_there = (float *)want_scale.data();
    if (refresh) {
      refresh_master(from.data(), to.data(), n, place, c.param_format, c.format, scale.address());
      refresh_master(kPortableIsa, from.data(), want.data(), n, 1, c.param_format, c.format, scale_there);
    } else if (decoding) {
      decode(c.format, from.data(), (float *)to.data(), n, place, scale.address(), c.root);
      decode(kPortableIsa, c.format, from.data(), (float *)want.data(), n, 1, scale_there, c.root);
    } else {
      encode(c.format, (const float *)from.data(), to.data(), n, place, scale.address(), c.root);
      encode(kPortableIsa, c.format, (const float *)from.data(), want.data(), n, 1, scale_there, c.root);
    }
    const std::string differs = difference("result", to, want) + difference("scale", scale, want_scale);
    if (!differs.empty()) return "n " + std::to_string(n) + ": " + differs;
  }
  return "";
}
