// Blocks as torch's caching allocator hands them out on CUDA, with one stream: segments are asked of the device and kept,
// a request takes the smallest free block that is large enough, and what is left of the block becomes one of its own only
// if that is worth it. So a tensor may count for up to 1 MiB more than it has bytes.
//
// With expandable segments there is one for small requests and one for others. Their addresses are theirs from the start,
// memory comes to them and goes by the page, and all that is left of a block is one of its own.
#pragma once

#include <sys/mman.h>

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
  size_t small_segment = 2u << 20;   // what is asked of the device for small requests, as a segment or as a page
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

  // To be called before any request, too.
  void expand_segments() {
    expands_ = true;
  }

  bool expands() const {
    return expands_;
  }

  // Null if the device has no room, even after all that is cached and whole was given back to it.
  void* take(size_t requested) {
    const size_t bytes = rounded(requested, kBlockBytes);
    auto& pool = pools_[bytes > sizes_.small];
    auto free = pool.lower_bound({bytes, nullptr});
    if (free == pool.end()) {
      char* more = expands_ ? more_of_segment(bytes) : new_segment(bytes);
      if (more == nullptr) {
        return nullptr;
      }
      free = pool.find({blocks_.at(more).bytes, more});
    }
    char* data = free->second;
    pool.erase(free);
    Block& block = blocks_.at(data);
    block.is_free = false;
    block.requested = requested;
    const size_t rest = block.bytes - bytes;
    if (block.is_large && !expands_ ? rest > sizes_.small : rest >= kBlockBytes) {
      block.bytes = bytes;
      blocks_[data + bytes] = Block{rest, 0, true, true, block.is_large, block.segment};
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
    block = joined(block);
    pools_[block->second.is_large].insert({block->second.bytes, block->first});
  }

  void empty_cache() {
    if (expands_) {
      unmap_free_pages();
      return;
    }
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
    bool is_free = true, is_mapped = true, is_large = false;
    char* segment = nullptr;
  };
  using Place = std::map<char*, Block>::iterator;

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
    blocks_[segment] = Block{size, 0, true, true, is_large, segment};
    pools_[is_large].insert({size, segment});
    reserve(size);
    return segment;
  }

  // A free block of at least so many bytes, at the first place where pages can be mapped for it.
  char* more_of_segment(size_t bytes) {
    const bool is_large = bytes > sizes_.small;
    char*& segment = expandable_[is_large];
    if (segment == nullptr) {
      void* data = mmap(nullptr, figures_.total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data == MAP_FAILED) {
        return nullptr;
      }
      segment = static_cast<char*>(data);
      blocks_[segment] = Block{figures_.total, 0, true, false, is_large, segment};
    }
    for (bool is_retry : {false, true}) {
      if (is_retry) {
        unmap_free_pages();
      }
      for (auto place = blocks_.find(segment); place != blocks_.end() && place->second.segment == segment; ++place) {
        if (place->second.is_mapped) {
          continue;
        }
        const size_t before = place == blocks_.begin() ? 0 : free_bytes(std::prev(place), segment);
        const size_t after = free_bytes(std::next(place), segment);
        if (before + place->second.bytes + after < bytes) {
          continue;
        }
        const size_t missing = bytes > before ? bytes - before : kBlockBytes;
        const size_t size = std::min(place->second.bytes, rounded(missing, page_of(is_large)));
        if (figures_.reserved + size > figures_.limit) {
          break;
        }
        if (size < place->second.bytes) {
          blocks_[place->first + size] = Block{place->second.bytes - size, 0, true, false, is_large, segment};
          place->second.bytes = size;
        }
        place->second.is_mapped = true;
        reserve(size);
        const auto whole = joined(place);
        pools_[is_large].insert({whole->second.bytes, whole->first});
        return whole->first;
      }
    }
    return nullptr;
  }

  // Give the device what pages have nothing on them.
  void unmap_free_pages() {
    for (auto place = blocks_.begin(); place != blocks_.end(); ++place) {
      auto& [start, block] = *place;
      const size_t page = page_of(block.is_large);
      const size_t from = rounded(start - block.segment, page), to = (start + block.bytes - block.segment) / page * page;
      if (!block.is_free || !block.is_mapped || to <= from) {
        continue;
      }
      pools_[block.is_large].erase({block.bytes, start});
      char *const first = block.segment + from, *const last = block.segment + to, *const end = start + block.bytes;
      if (last < end) {
        const size_t rest = end - last;
        blocks_[last] = Block{rest, 0, true, true, block.is_large, block.segment};
        pools_[block.is_large].insert({rest, last});
      }
      auto unmapped = place;
      if (start < first) {
        block.bytes = first - start;
        pools_[block.is_large].insert({block.bytes, start});
        unmapped = blocks_.emplace(first, Block{0, 0, true, false, block.is_large, block.segment}).first;
      }
      unmapped->second.bytes = last - first;
      unmapped->second.is_mapped = false;
      madvise(first, last - first, MADV_DONTNEED);
      figures_.reserved -= last - first;
      place = joined(unmapped);
    }
  }

  // A block together with its free neighbours, if these are mapped as it is. It is in no pool, and they are not any more.
  Place joined(Place block) {
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
      return before;
    }
    return block;
  }

  size_t free_bytes(Place place, const char* segment) const {
    const bool is_there = place != blocks_.end() && place->second.segment == segment;
    return is_there && place->second.is_free && place->second.is_mapped ? place->second.bytes : 0;
  }

  size_t page_of(bool is_large) const {
    return is_large ? sizes_.large_segment : sizes_.small_segment;
  }

  void reserve(size_t bytes) {
    figures_.reserved += bytes;
    figures_.peak_reserved = std::max(figures_.peak_reserved, figures_.reserved);
  }

  void add(size_t bytes, size_t requested) {
    figures_.live += bytes;
    figures_.requested += requested;
    figures_.peak = std::max(figures_.peak, figures_.live);
    figures_.peak_requested = std::max(figures_.peak_requested, figures_.requested);
  }

  static bool is_one_with(const Block& block, const Block& neighbour) {
    return neighbour.is_free && neighbour.is_mapped == block.is_mapped && neighbour.segment == block.segment;
  }

  std::map<char*, Block> blocks_;
  std::map<char*, size_t> segments_;
  char* expandable_[2] = {nullptr, nullptr};  // segments of small requests and of others
  bool expands_ = false;
  std::set<std::pair<size_t, char*>> pools_[2];  // free blocks, of small requests and of others
  Sizes sizes_;
  Figures figures_{};
};

}  // namespace emulated_cuda
