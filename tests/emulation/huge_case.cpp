#include "huge_case.h"

#include <sys/mman.h>

#include <vector>

#include "../../csrc/cpu/adam.h"
#include "../../csrc/cuda/adam.h"
#include "cuda_runtime.h"

using namespace statestream;

namespace {

constexpr int64_t kPiece = 8192;  // elements of a block
int64_t last_block;

// Reserved, not occupied: pages come as they are written.
class Sparse {
 public:
  explicit Sparse(size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Sparse() { munmap(memory_, bytes_); }
  Sparse(const Sparse &) = delete;
  uint16_t *data() const { return (uint16_t *)memory_; }

 private:
  void *memory_;
  size_t bytes_;
};

constexpr uint16_t kOne = 0x3f80;  // BF16

}  // namespace

// All BF16. The gradient is one at the ends of the tensor and one past 2^31 and 2^32, and also where an
// index cut to 32 bits would take each of these; blocks at all of them run.
std::string run_huge(int64_t n) {
  const Sparse param(2 * n), grad(2 * n), exp_avg(2 * n), exp_avg_sq(2 * n);
  std::vector<int64_t> touched = {0, 5, n - 1, n - 9, n - n % kPiece - 1};
  for (int64_t i : {int64_t{1} << 31, int64_t{1} << 32})
    if (i + kPiece < n) touched.insert(touched.end(), {i, i + 1, i + kPiece - 1});
  for (int64_t i : touched) grad.data()[i] = kOne;
  float step = 0;
  TensorRow row{};
  row.numel = n;
  row.param = (uint64_t)param.data();
  row.grad = (uint64_t)grad.data();
  row.exp_avg = (uint64_t)exp_avg.data();
  row.exp_avg_sq = (uint64_t)exp_avg_sq.data();
  row.step = (uint64_t)&step;
  const TableFormats formats{kBFloat16, kBFloat16, kBFloat16, kBFloat16, kNone};
  const AdamOptions options{1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 1, 0};

  // A block for each piece, of which those run that hold something.
  emulation::settings.multiprocessors = (int)((n + kPiece - 1) / kPiece);
  last_block = (n - 1) / kPiece;
  emulation::settings.runs_block = [](unsigned block) {
    const int64_t piece = block, first = (int64_t{1} << 31) / kPiece, second = (int64_t{1} << 32) / kPiece;
    return piece < 2 || piece >= last_block - 1 || piece == first || piece == second;
  };
  adam(formats, &row, 1, options, 1.0, true, {0, nullptr});
  if (step != 1.0f) return "the step counter is " + std::to_string(step);

  uint16_t moved = 0, one = kOne, m = 0, v = 0;
  TensorRow single = row;
  single.numel = 1;
  single.param = (uint64_t)&moved;
  single.grad = (uint64_t)&one;
  single.exp_avg = (uint64_t)&m;
  single.exp_avg_sq = (uint64_t)&v;
  adam(kPortableIsa, formats, &single, 1, options, 1.0, 1);
  if (!moved || !m || !v) return "the reference moved nothing";
  for (int64_t i : touched)
    if (param.data()[i] != moved || exp_avg.data()[i] != m || exp_avg_sq.data()[i] != v)
      return "element " + std::to_string(i) + " was not updated";
  for (int64_t i : touched)
    for (int64_t k : {i - 1, i + 1, i & 0x7fffffff, i & 0xffffffff})
      if (k >= 0 && k < n && !grad.data()[k] && (param.data()[k] || exp_avg.data()[k]))
        return "element " + std::to_string(k) + " was written";
  return "";
}
