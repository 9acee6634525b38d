// The device itself: memory that is counted as CUDA's caching allocator counts it, a guard, a generator and the hooks
// by which torch asks whether there is a GPU. Memory is the host's, and whatever is enqueued is done at once.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "caching_allocator.h"

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;
constexpr size_t kTotalBytes = 16ull << 30;

const c10::Device kDevice(kCUDA, 0);

struct DeviceAllocator final : c10::Allocator {
  std::mutex mutex;
  emulated_cuda::CachingAllocator blocks{kTotalBytes};

  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? take(bytes) : nullptr;
    return {data, data, &give_back, kDevice};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }

  void copy_data(void* dest, const void* source, std::size_t count) const override {
    std::memcpy(dest, source, count);
  }

  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    follow_settings();
    void* data = blocks.take(bytes);
    if (data == nullptr) {
      blocks.count_out_of_memory();
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes; ",
          blocks.figures().reserved, " of ", blocks.figures().limit, " bytes are reserved (emulated device)");
    }
    return data;
  }

  // What torch reads when the device is first used.
  void follow_settings() {
    if (followed) {
      return;
    }
    followed = true;
    for (const char* name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
      const char* value = std::getenv(name);
      if (value != nullptr && std::strstr(value, "expandable_segments:True") != nullptr) {
        blocks.expand_segments();
      }
    }
  }

  bool followed = false;

  static void give_back(void* data);
};

DeviceAllocator& allocator() {
  static auto* one = new DeviceAllocator();
  return *one;
}

void DeviceAllocator::give_back(void* data) {
  if (data == nullptr) {
    return;
  }
  auto& self = allocator();
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.blocks.give_back(data);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only_stream() {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::DeviceType type() const override { return kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal ", device.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only_stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

// A seed and an offset, as CUDA's: whoever draws moves the offset on, and the state is these sixteen bytes.
struct Philox final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  Philox() : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == 16, "a state of a CUDA generator has 16 bytes on the CPU");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, c10::ScalarType::Byte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Philox();
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

const at::Generator& default_generator() {
  static auto* one = new at::Generator(c10::make_intrusive<Philox>());
  return *one;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::Generator(c10::make_intrusive<Philox>());
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);
}

extern "C" {

// Puts the device in place; false if torch had looked for a GPU already, and so goes on without.
bool emulated_cuda_start() {
  c10::SetAllocator(kCUDA, &allocator());
  return at::detail::getCUDAHooks().hasCUDA();
}

PyObject* emulated_cuda_generator() {
  return THPGenerator_initDefaultGenerator(default_generator());
}

// live, peak, requested, peak requested, reserved, peak reserved, limit, total, out-of-memory errors
void emulated_cuda_memory(emulated_cuda::Figures* figures) {
  auto& self = allocator();
  const std::lock_guard<std::mutex> lock(self.mutex);
  *figures = self.blocks.figures();
}

void emulated_cuda_reset_peak() {
  auto& self = allocator();
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.blocks.reset_peaks();
}

void emulated_cuda_empty_cache() {
  auto& self = allocator();
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.blocks.empty_cache();
}

void emulated_cuda_set_limit(uint64_t bytes) {
  auto& self = allocator();
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.blocks.set_limit(bytes);
}

bool emulated_cuda_expands() {
  auto& self = allocator();
  const std::lock_guard<std::mutex> lock(self.mutex);
  return self.blocks.expands();
}

void emulated_cuda_shrink(uint64_t times) {
  auto& self = allocator();
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.blocks.shrink(times);
}

}
