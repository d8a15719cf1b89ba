// Device memory, pinned memory, registered memory: who has what, and what an address is.
#include <sys/mman.h>

#include <cstring>

#include "runtime.h"

namespace fake {
namespace {

std::map<uintptr_t, Block> blocks;
size_t taken[kDevices];
int registers_until_refusal = -1;

// Addresses are never given out twice: whoever uses freed memory is stopped by the system.
void *map(size_t bytes) {
  void *const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
void unmap(uintptr_t address, size_t bytes) {
  (void)mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

cudaError_t give_back(void *address, Kind kind, const char *call) {
  const auto found = blocks.find((uintptr_t)address);
  if (found == blocks.end() || found->second.kind != kind) return fail(cudaErrorInvalidValue);
  if (const cudaError_t error = refuse_in_capture(call)) return fail(error);
  // Both cudaFree and cudaFreeHost wait for the device.
  run_all(found->second.device);
  if (kind == Kind::kDevice) taken[found->second.device] -= found->second.bytes;
  unmap(found->first, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}

cudaError_t take(void **address, size_t bytes, Kind kind, const char *call) {
  const Lock lock;
  const int device = need_context(call);
  if (const cudaError_t error = refuse_in_capture(call)) return fail(error);
  *address = nullptr;
  if (!bytes) return cudaSuccess;
  if (kind == Kind::kDevice && taken[device] + bytes > kDeviceBytes) return fail(cudaErrorMemoryAllocation);
  if (!(*address = map(bytes))) return fail(cudaErrorMemoryAllocation);
  if (kind == Kind::kDevice) {
    taken[device] += bytes;
    use(device);
  }
  blocks[(uintptr_t)*address] = {(uintptr_t)*address, bytes, kind, device};
  return cudaSuccess;
}

}  // namespace

Block block_of(const void *address) {
  auto next = blocks.upper_bound((uintptr_t)address);
  if (next != blocks.begin()) {
    const Block &block = std::prev(next)->second;
    if ((uintptr_t)address - block.begin < block.bytes) return block;
  }
  return {(uintptr_t)address, 0, Kind::kPageable, -1};
}

bool within_one_block(const void *address, size_t bytes) {
  const Block block = block_of(address);
  if (block.kind != Kind::kPageable) return (uintptr_t)address + bytes <= block.begin + block.bytes;
  const auto next = blocks.lower_bound((uintptr_t)address);
  return next == blocks.end() || (uintptr_t)address + bytes <= next->first;
}

void poison(void *address, size_t bytes) { std::memset(address, 0xff, bytes); }

}  // namespace fake

using namespace fake;

// The n-th call of cudaHostRegister from now, from 0 on, is refused.
API void fake_refuse_register(int n) { registers_until_refusal = n; }

// Registered blocks, a line each.
API const char *fake_registered() {
  const Lock lock;
  static std::string text;
  text.clear();
  for (const auto &[address, block] : blocks)
    if (block.kind == Kind::kRegistered)
      text += std::to_string(block.bytes) + " bytes at " + std::to_string(address) + "\n";
  return text.c_str();
}

API cudaError_t cudaMalloc(void **address, size_t bytes) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  return take(address, bytes, Kind::kDevice, "cudaMalloc");
}

API cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  return take(address, bytes, Kind::kPinned, "cudaHostAlloc");
}

API cudaError_t cudaFree(void *address) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  return address ? give_back(address, Kind::kDevice, "cudaFree") : cudaSuccess;
}

API cudaError_t cudaFreeHost(void *address) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  return address ? give_back(address, Kind::kPinned, "cudaFreeHost") : cudaSuccess;
}

API cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  const int device = need_context("cudaHostRegister");
  if (const cudaError_t error = refuse_in_capture("cudaHostRegister")) return fail(error);
  if (!address || !bytes) return fail(cudaErrorInvalidValue);
  if (registers_until_refusal >= 0 && registers_until_refusal-- == 0) return fail(cudaErrorMemoryAllocation);
  const auto next = blocks.lower_bound((uintptr_t)address);
  const bool overlaps = next != blocks.end() && next->first < (uintptr_t)address + bytes;
  if (overlaps || block_of(address).kind != Kind::kPageable) return fail(cudaErrorHostMemoryAlreadyRegistered);
  blocks[(uintptr_t)address] = {(uintptr_t)address, bytes, Kind::kRegistered, device};
  use(device);
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *address) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaHostUnregister");
  if (const cudaError_t error = refuse_in_capture("cudaHostUnregister")) return fail(error);
  const auto found = blocks.find((uintptr_t)address);
  if (found == blocks.end() || found->second.kind != Kind::kRegistered) return fail(cudaErrorHostMemoryNotRegistered);
  use(found->second.device);
  blocks.erase(found);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  need_context("cudaPointerGetAttributes");
  const Block block = block_of(address);
  *attributes = cudaPointerAttributes();
  attributes->type = block.kind == Kind::kPageable ? cudaMemoryTypeUnregistered
                     : block.kind == Kind::kDevice ? cudaMemoryTypeDevice
                                                   : cudaMemoryTypeHost;
  attributes->device = block.kind == Kind::kPageable ? -2 : block.device;
  if (block.kind != Kind::kPageable) attributes->devicePointer = (void *)address;
  if (block.kind != Kind::kDevice) attributes->hostPointer = (void *)address;
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  const int device = need_context("cudaMemGetInfo");
  *total = kDeviceBytes;
  *free = kDeviceBytes - taken[device];
  return cudaSuccess;
}
