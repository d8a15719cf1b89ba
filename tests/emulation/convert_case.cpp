#include "convert_case.h"

#include <vector>

#include "../../csrc/cpu/adam.h"
#include "../../csrc/cuda/adam.h"
#include "guarded.h"

using namespace statestream;

namespace {

// Masters that round to the weight, and others that do not.
void make_masters(const uint8_t *weights, uint8_t *masters, int64_t n, Random &random) {
  for (int64_t i = 0; i < n; ++i) {
    uint16_t weight;
    memcpy(&weight, weights + 2 * i, 2);
    uint32_t bits = (uint32_t)weight << 16;
    const uint64_t choice = random.next() % 4;
    if (choice == 0) bits |= (uint32_t)random.next() & 0x7fffu;
    if (choice == 1) bits ^= (uint32_t)random.next();
    memcpy(masters + 4 * i, &bits, 4);
  }
}

}  // namespace

std::string run_convert(const ConvertCase &c) {
  Random random(c.seed);
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n <= 130; ++n) lengths.push_back(n);
  for (int64_t n : {1023, 1024, 1025, 5000, 70001}) lengths.push_back(n);
  const bool refresh = c.what == "refresh_master", decoding = c.what == "decode";
  const int32_t from_format = refresh ? (int32_t)kBFloat16 : decoding ? c.format : (int32_t)kFloat32;
  const int32_t to_format = refresh || decoding ? (int32_t)kFloat32 : c.format;
  const int64_t from_bytes = format_bytes(from_format), to_bytes = format_bytes(to_format);
  for (int64_t n : lengths) {
    const Guarded from(n * from_bytes, c.from_offset * from_bytes);
    const Guarded to(n * to_bytes, c.to_offset * to_bytes);
    fill(from.data(), n, from_format, Role::kWeight, c.values, random);
    if (refresh)
      make_masters(from.data(), to.data(), n, random);
    else
      fill(to.data(), n, to_format, Role::kWeight, Values::kAnyBits, random);
    std::vector<uint8_t> want(to.data(), to.data() + to.bytes());
    want.reserve(1);  // an address even for no elements
    const Place place{0, nullptr};
    if (refresh) {
      refresh_master((const uint16_t *)from.data(), (float *)to.data(), n, place);
      refresh_master(kPortableForm, (const uint16_t *)from.data(), (float *)want.data(), n, 1);
    } else if (decoding) {
      decode(c.format, from.data(), (float *)to.data(), n, place);
      decode(kPortableForm, c.format, from.data(), (float *)want.data(), n, 1);
    } else {
      encode(c.format, (const float *)from.data(), to.data(), n, place);
      encode(kPortableForm, c.format, (const float *)from.data(), want.data(), n, 1);
    }
    if (!to.untouched_before()) return "n " + std::to_string(n) + ": bytes before the result were written";
    for (size_t k = 0; k < to.bytes(); ++k)
      if (to.data()[k] != want[k]) return "n " + std::to_string(n) + ": byte " + std::to_string(k) + " differs";
  }
  return "";
}
