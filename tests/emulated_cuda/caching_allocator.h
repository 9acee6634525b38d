// Blocks as torch's caching allocator hands them out on CUDA, with its default settings and one stream: segments are
// asked of the device and kept, a request takes the smallest free block that is large enough, and what is left of the
// block becomes one of its own only if that is worth it. So a tensor may count for up to 1 MiB more than it has bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace emulated_cuda {

constexpr size_t kBlockBytes = 512;  // what a request is rounded up to

struct Sizes {
  size_t small = 1u << 20;           // up to here a request is a small one; so much is left over from a large block
  size_t small_segment = 2u << 20;   // what is asked of the device for small requests
  size_t large_segment = 20u << 20;  // and for others, but for those of a segment of their own
  size_t own_segment = 10u << 20;    // from here on a request has one
  size_t rounding = 2u << 20;        // of such segments
};

inline size_t rounded(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

struct Figures {
  uint64_t live, peak, requested, peak_requested, reserved, peak_reserved, limit, total, num_ooms;
};

class CachingAllocator {
 public:
  explicit CachingAllocator(size_t total) {
    figures_.limit = figures_.total = total;
  }

  // A small model's blocks fall apart as those of a model `times` as large do on a GPU. To be called before any request.
  void shrink(size_t times) {
    sizes_ = Sizes{};
    for (size_t* size : {&sizes_.small, &sizes_.small_segment, &sizes_.large_segment, &sizes_.own_segment, &sizes_.rounding}) {
      *size /= times;
    }
  }

  // Null if the device has no room, even after all that is cached and whole was given back to it.
  void* take(size_t requested) {
    const size_t bytes = rounded(requested, kBlockBytes);
    auto& pool = pools_[bytes > sizes_.small];
    auto free = pool.lower_bound({bytes, nullptr});
    if (free == pool.end()) {
      char* segment = new_segment(bytes);
      if (segment == nullptr) {
        return nullptr;
      }
      free = pool.find({blocks_.at(segment).bytes, segment});
    }
    char* data = free->second;
    pool.erase(free);
    Block& block = blocks_.at(data);
    block.is_free = false;
    block.requested = requested;
    const size_t rest = block.bytes - bytes;
    if (block.is_large ? rest > sizes_.small : rest >= kBlockBytes) {
      block.bytes = bytes;
      blocks_[data + bytes] = Block{rest, 0, true, block.is_large, block.segment};
      pool.insert({rest, data + bytes});
    }
    add(block.bytes, requested);
    return data;
  }

  void give_back(void* pointer) {
    auto block = blocks_.find(static_cast<char*>(pointer));
    figures_.live -= block->second.bytes;
    figures_.requested -= block->second.requested;
    block->second.is_free = true;
    block->second.requested = 0;
    auto& pool = pools_[block->second.is_large];
    const auto next = std::next(block);
    if (next != blocks_.end() && is_one_with(block->second, next->second)) {
      pool.erase({next->second.bytes, next->first});
      block->second.bytes += next->second.bytes;
      blocks_.erase(next);
    }
    if (block != blocks_.begin() && is_one_with(block->second, std::prev(block)->second)) {
      const auto before = std::prev(block);
      pool.erase({before->second.bytes, before->first});
      before->second.bytes += block->second.bytes;
      blocks_.erase(block);
      block = before;
    }
    pool.insert({block->second.bytes, block->first});
  }

  void empty_cache() {
    for (auto segment = segments_.begin(); segment != segments_.end();) {
      auto block = blocks_.find(segment->first);
      if (!block->second.is_free || block->second.bytes != segment->second) {
        ++segment;
        continue;
      }
      pools_[block->second.is_large].erase({block->second.bytes, block->first});
      blocks_.erase(block);
      figures_.reserved -= segment->second;
      std::free(segment->first);
      segment = segments_.erase(segment);
    }
  }

  void reset_peaks() {
    figures_.peak = figures_.live;
    figures_.peak_requested = figures_.requested;
    figures_.peak_reserved = figures_.reserved;
  }

  void set_limit(size_t bytes) {
    figures_.limit = bytes;
  }

  void count_out_of_memory() {
    figures_.num_ooms++;
  }

  const Figures& figures() const {
    return figures_;
  }

 private:
  struct Block {
    size_t bytes = 0, requested = 0;
    bool is_free = true, is_large = false;
    char* segment = nullptr;
  };

  char* new_segment(size_t bytes) {
    const bool is_large = bytes > sizes_.small;
    const size_t own = bytes < sizes_.own_segment ? sizes_.large_segment : rounded(bytes, sizes_.rounding);
    const size_t size = is_large ? own : sizes_.small_segment;
    if (figures_.reserved + size > figures_.limit) {
      empty_cache();
    }
    void* data = nullptr;
    if (figures_.reserved + size > figures_.limit || posix_memalign(&data, kBlockBytes, size) != 0) {
      return nullptr;
    }
    auto* segment = static_cast<char*>(data);
    segments_[segment] = size;
    blocks_[segment] = Block{size, 0, true, is_large, segment};
    pools_[is_large].insert({size, segment});
    figures_.reserved += size;
    figures_.peak_reserved = std::max(figures_.peak_reserved, figures_.reserved);
    return segment;
  }

  void add(size_t bytes, size_t requested) {
    figures_.live += bytes;
    figures_.requested += requested;
    figures_.peak = std::max(figures_.peak, figures_.live);
    figures_.peak_requested = std::max(figures_.peak_requested, figures_.requested);
  }

  static bool is_one_with(const Block& block, const Block& neighbour) {
    return neighbour.is_free && neighbour.segment == block.segment;
  }

  std::map<char*, Block> blocks_;
  std::map<char*, size_t> segments_;
  std::set<std::pair<size_t, char*>> pools_[2];  // free blocks, of small requests and of others
  Sizes sizes_;
  Figures figures_{};
};

}  // namespace emulated_cuda
