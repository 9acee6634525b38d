// Counts the bytes that torch's tensors have on the CPU, and refuses those above a limit. Preloaded into a process
// (LD_PRELOAD) it stands between libc10, whose allocator all of them come from, and the C library: nothing of torch's
// or Adacc's own accounts is asked.
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

extern "C" {
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);
}

namespace {

constexpr size_t kAlignment = 64;  // of c10's blocks
constexpr size_t kShards = 64;

std::atomic<int64_t> live{0}, peak{0}, limit{INT64_MAX}, refusals{0}, num_blocks{0};

// Set while this thread is in a table, whose own nodes are freed by the very `free` below.
thread_local bool inside __attribute__((tls_model("initial-exec"))) = false;

struct Shard {
  std::mutex mutex;
  std::unordered_map<void *, int64_t> sizes;
};

Shard &shard_of(void *block) {
  static auto *shards = new Shard[kShards];  // never destroyed: blocks are freed until the process is gone
  return shards[(reinterpret_cast<uintptr_t>(block) / kAlignment) % kShards];
}

// Whether code at `address` is libc10's. Its allocator calls from one place, which is remembered. So are some places of
// others: oneDNN allocates thousands of times a step, and dladdr takes milliseconds in a library as large as libtorch_cpu.
bool is_torch(void *address) {
  static std::atomic<void *> known{nullptr}, others[256];
  if (address == known.load(std::memory_order_relaxed)) return true;
  auto &other = others[(reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15u) >> 56];
  if (address == other.load(std::memory_order_relaxed)) return false;
  Dl_info info;
  if (!dladdr(address, &info) || info.dli_fname == nullptr || !strstr(info.dli_fname, "libc10.so")) {
    other.store(address, std::memory_order_relaxed);
    return false;
  }
  known.store(address, std::memory_order_relaxed);
  return true;
}

bool take(int64_t size) {
  int64_t now = live.fetch_add(size) + size;
  if (now > limit.load()) {
    live.fetch_sub(size);
    refusals.fetch_add(1);
    return false;
  }
  int64_t most = peak.load();
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
  return true;
}

}  // namespace

extern "C" {

int posix_memalign(void **result, size_t alignment, size_t size) {
  const bool counted = alignment == kAlignment && is_torch(__builtin_return_address(0));
  if (counted && !take(size)) return ENOMEM;
  void *block = __libc_memalign(alignment, size);
  if (block == nullptr) {
    if (counted) live.fetch_sub(size);
    return ENOMEM;
  }
  if (counted) {
    inside = true;
    Shard &shard = shard_of(block);
    {
      std::lock_guard<std::mutex> guard(shard.mutex);
      shard.sizes[block] = size;
    }
    num_blocks.fetch_add(1);
    inside = false;
  }
  *result = block;
  return 0;
}

void free(void *block) {
  // libc10 jumps here, so that the caller cannot be known: every block that might be one of its own is looked up.
  if (!inside && block != nullptr && reinterpret_cast<uintptr_t>(block) % kAlignment == 0 && num_blocks.load() > 0) {
    inside = true;
    int64_t size = -1;
    Shard &shard = shard_of(block);
    {
      std::lock_guard<std::mutex> guard(shard.mutex);
      auto found = shard.sizes.find(block);
      if (found != shard.sizes.end()) {
        size = found->second;
        shard.sizes.erase(found);
      }
    }
    if (size >= 0) {
      num_blocks.fetch_sub(1);
      live.fetch_sub(size);
    }
    inside = false;
  }
  const int before = errno;
  __libc_free(block);
  errno = before;
}

int64_t memory_meter_live() { return live.load(); }
int64_t memory_meter_peak() { return peak.load(); }
int64_t memory_meter_refusals() { return refusals.load(); }
void memory_meter_reset_peak() { peak.store(live.load()); }
void memory_meter_limit(int64_t bytes) { limit.store(bytes); }
}
