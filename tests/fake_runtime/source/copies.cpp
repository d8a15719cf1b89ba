// Copies and fills. Until a copy has arrived its destination holds poison; its parts arrive in any order.
#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace fake {
namespace {

constexpr double kBytesPerMillisecond = 25e6;

struct Ends {
  char *to;
  const char *from;
  size_t bytes;
  Block to_block, from_block;  // as they were when the copy was queued
};

bool is_still_there(const Block &block, const void *address) {
  if (block.kind == Kind::kPageable) return true;
  const Block now = block_of(address);
  return now.begin == block.begin && now.kind == block.kind;
}

bool can_run(const Ends &ends) {
  if (is_still_there(ends.to_block, ends.to) && is_still_there(ends.from_block, ends.from)) return true;
  report("a queued copy of " + std::to_string(ends.bytes) + " bytes ran after its memory was freed or unregistered");
  return false;
}

Work copying(const Ends &ends) {
  Work work;
  work.name = "copy of " + std::to_string(ends.bytes) + " bytes";
  work.milliseconds = 0.005 + (double)ends.bytes / kBytesPerMillisecond;
  const bool overlaps = ends.to < ends.from + ends.bytes && ends.from < ends.to + ends.bytes;
  if (overlaps) {
    if (ends.to != ends.from) report("a copy whose source and destination overlap");
    work.steps.push_back([ends] { std::memmove(ends.to, ends.from, ends.bytes); });
    return work;
  }
  work.steps.push_back([ends] {
    if (can_run(ends)) poison(ends.to, ends.bytes);
  });
  std::vector<size_t> cuts{0, ends.bytes};
  for (uint64_t k = draw(3); k > 0; --k) cuts.push_back(draw(ends.bytes + 1));
  std::sort(cuts.begin(), cuts.end());
  std::vector<Step> parts;
  for (size_t k = 0; k + 1 < cuts.size(); ++k)
    parts.push_back([ends, begin = cuts[k], end = cuts[k + 1]] {
      if (end > begin && can_run(ends)) std::memcpy(ends.to + begin, ends.from + begin, end - begin);
    });
  while (!parts.empty()) {
    const auto chosen = parts.begin() + draw(parts.size());
    work.steps.push_back(std::move(*chosen));
    parts.erase(chosen);
  }
  return work;
}

cudaError_t copy(void *to, const void *from, size_t bytes, const std::shared_ptr<Stream> &stream) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!bytes) return cudaSuccess;
  if (!within_one_block(to, bytes) || !within_one_block(from, bytes)) return fail(cudaErrorInvalidValue);
  Ends ends{(char *)to, (const char *)from, bytes, block_of(to), block_of(from)};
  use(stream->device);
  const bool to_host = ends.to_block.kind == Kind::kPageable, from_host = ends.from_block.kind == Kind::kPageable;
  std::shared_ptr<char[]> staged;
  if (from_host && !to_host && !stream->capture) {
    // CUDA takes pageable memory in before the call returns.
    staged.reset(new char[bytes]);
    std::memcpy(staged.get(), from, bytes);
    ends.from = staged.get();
  }
  Work work = copying(ends);
  work.keeps = staged;
  if (const cudaError_t error = push(stream, std::move(work))) return error;
  if (to_host && !stream->capture) {
    count_host_wait("cudaMemcpyAsync to pageable memory");
    run_until(tail(stream));
  }
  return cudaSuccess;
}

cudaError_t fill(void *address, int value, size_t bytes, const std::shared_ptr<Stream> &stream) {
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!bytes) return cudaSuccess;
  const Block block = block_of(address);
  if (block.kind == Kind::kPageable || !within_one_block(address, bytes)) return fail(cudaErrorInvalidValue);
  use(stream->device);
  Work work;
  work.name = "fill of " + std::to_string(bytes) + " bytes";
  work.steps.push_back([=] {
    if (is_still_there(block, address))
      std::memset(address, value, bytes);
    else
      report("a queued fill ran after its memory was freed");
  });
  return push(stream, std::move(work));
}

cudaError_t wait_for(const std::shared_ptr<Stream> &stream, const char *call) {
  count_host_wait(call);
  run_until(tail(stream));
  return cudaSuccess;
}

}  // namespace
}  // namespace fake

using namespace fake;

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaMemcpyAsync");
  return copy(to, from, bytes, stream_of(stream));
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaMemcpyPeerAsync");
  return copy(to, from, bytes, stream_of(stream));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaMemcpy");
  if (const cudaError_t error = refuse_in_capture("cudaMemcpy")) return fail(error);
  const auto stream = stream_of(nullptr);
  if (const cudaError_t error = copy(to, from, bytes, stream)) return error;
  return wait_for(stream, "cudaMemcpy");
}

API cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaMemsetAsync");
  return fill(address, value, bytes, stream_of(stream));
}

API cudaError_t cudaMemset(void *address, int value, size_t bytes) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaMemset");
  if (const cudaError_t error = refuse_in_capture("cudaMemset")) return fail(error);
  return fill(address, value, bytes, stream_of(nullptr));
}
