// CUDA's operators, done by the CPU's: tensors cross as CPU tensors on the same memory, and what is new comes back in
// memory of the device. Two devices in one operator, and waiting where that is forbidden, raise as on a GPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <atomic>
#include <set>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using Stack = torch::jit::Stack;

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
constexpr size_t kWorkspaceBytes = 8519680;  // what cuBLAS keeps for each thread that multiplied, before Hopper

std::atomic<bool> waiting_is_an_error{false};

c10::Allocator* device_allocator() {
  return c10::GetAllocator(c10::DeviceType::CUDA);
}

void forbid_waiting(const char* what) {
  TORCH_CHECK(!waiting_is_an_error, "called a synchronizing CUDA operation: ", what);
}

// The way of one operator's tensors to the CPU and back.
class Crossing {
 public:
  Tensor to_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      if (tensor.defined() && tensor.is_cpu()) {
        from_cpu_.insert(tensor.storage().unsafeGetStorageImpl());
      }
      return tensor;
    }
    for (const auto& [there, here] : tensors_) {
      if (there.is_same(tensor)) {
        return here;
      }
    }
    auto alias = tensor_on(to_cpu(tensor.storage()), c10::DispatchKey::CPU, tensor);
    tensors_.emplace_back(tensor, alias);
    return alias;
  }

  // A storage of the CPU's on the same memory, which it keeps alive.
  Storage to_cpu(const Storage& storage) {
    auto& known = by_device_storage_[storage.unsafeGetStorageImpl()];
    if (!known) {
      auto* holder = new Storage(storage);
      c10::DataPtr data(
          storage.mutable_data(), holder, [](void* kept) { delete static_cast<Storage*>(kept); }, c10::kCPU);
      known = Storage(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true));
      by_cpu_storage_.emplace(known.unsafeGetStorageImpl(), storage);
    }
    return known;
  }

  Tensor to_device(const Tensor& result) {
    // What was copied to is the host's, and stays there.
    if (!result.defined() || !result.is_cpu() || from_cpu_.count(result.storage().unsafeGetStorageImpl())) {
      return result;
    }
    for (const auto& [there, here] : tensors_) {
      if (here.is_same(result)) {
        return there;
      }
    }
    return tensor_on(to_device(result.storage()), c10::DispatchKey::CUDA, result);
  }

  // What operators write into may have another size, or memory, than before.
  void bring_back_changes() {
    for (const auto& [there, here] : tensors_) {
      const auto storage = to_device(here.storage());
      auto* impl = there.unsafeGetTensorImpl();
      if (!storage.is_alias_of(there.storage())) {
        impl->set_storage_keep_dtype(storage);
      }
      if (storage.data() != here.storage().data() || storage.nbytes() != here.storage().nbytes()) {
        auto moved = copied(here.storage());
        const_cast<Storage&>(storage).set_data_ptr_noswap(std::move(moved));
        storage.unsafeGetStorageImpl()->set_nbytes(here.storage().nbytes());
      }
      if (there.sizes() != here.sizes() || there.strides() != here.strides() ||
          there.storage_offset() != here.storage_offset()) {
        impl->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
      }
    }
  }

 private:
  static c10::DataPtr copied(const Storage& storage) {
    auto data = device_allocator()->allocate(storage.nbytes());
    if (storage.nbytes()) {
      std::memcpy(data.get(), storage.data(), storage.nbytes());
    }
    return data;
  }

  Storage to_device(const Storage& storage) {
    const auto known = by_cpu_storage_.find(storage.unsafeGetStorageImpl());
    if (known != by_cpu_storage_.end()) {
      return known->second;
    }
    Storage made(c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), storage.nbytes(), copied(storage), device_allocator(), true));
    by_cpu_storage_.emplace(storage.unsafeGetStorageImpl(), made);
    return made;
  }

  static Tensor tensor_on(const Storage& storage, c10::DispatchKey key, const Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    made._set_conj(like.is_conj());
    made._set_neg(like.is_neg());
    return made;
  }

  std::vector<std::pair<Tensor, Tensor>> tensors_;
  std::set<StorageImpl*> from_cpu_;
  std::unordered_map<StorageImpl*, Storage> by_device_storage_, by_cpu_storage_;
};

// `change` made of every tensor in a value, lists included.
template <typename Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& one : value.toTensorVector()) {
      changed.push_back(change(one));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& one : value.toOptionalTensorVector()) {
      changed.push_back(one ? std::optional<Tensor>(change(*one)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

// Random numbers as the CPU makes them from a seed made of the device's, whose offset moves on; the CPU's own generator
// is left as it was.
class Drawing {
 public:
  explicit Drawing(at::Generator device) : device_(std::move(device)), cpu_(at::detail::getDefaultCPUGenerator()) {
    before_ = cpu_.get_state();
    cpu_.set_current_seed(device_.current_seed() * 0x9E3779B97F4A7C15ull + device_.get_offset());
    seeded_ = cpu_.get_state();
  }
  ~Drawing() {
    if (!cpu_.get_state().equal(seeded_)) {
      device_.set_offset(device_.get_offset() + 4);
    }
    cpu_.set_state(before_);
  }

 private:
  at::Generator device_, cpu_;
  Tensor before_, seeded_;
};

bool is_any(const std::string& name, const std::set<std::string>& names) {
  return names.count(name.substr(name.find("::") + 2)) > 0;
}

const std::set<std::string> kMultiplies = {"mm", "addmm", "bmm", "baddbmm", "addmv", "addbmm"};
const std::set<std::string> kWaits = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "repeat_interleave", "is_nonzero"};
const std::set<std::string> kTakesBoth = {
    "copy_", "index", "index_put_", "_index_put_impl_", "_copy_from", "_copy_from_and_resize", "set_"};

void check_devices(const c10::OperatorHandle& op, const Stack& stack, size_t begin) {
  const auto& name = op.operator_name().name;
  bool on_device = false, on_cpu = false;
  for (size_t i = begin; i < stack.size(); i++) {
    with_tensors(stack[i], [&](const Tensor& one) {
      on_device |= one.defined() && one.is_cuda();
      on_cpu |= one.defined() && one.is_cpu() && one.dim() > 0;
      return one;
    });
  }
  TORCH_CHECK(
      !(on_device && on_cpu) || is_any(name, kTakesBoth),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
  if (is_any(name, kWaits)) {
    forbid_waiting(name.c_str());
  }
  if (name == "aten::copy_" && on_device && !stack.back().toBool()) {
    const bool both = stack[begin].toTensor().is_cuda() && stack[begin + 1].toTensor().is_cuda();
    if (!both) {
      forbid_waiting("a copy between host and device");
    }
  }
}

void keep_workspace() {
  thread_local c10::DataPtr workspace;
  if (!workspace) {
    workspace = device_allocator()->allocate(kWorkspaceBytes);
  }
}

// The operator as the CPU does it, none of autograd, autocast or modes taking part a second time.
void call_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto num_arguments = op.schema().arguments().size();
  const auto begin = stack->size() - num_arguments;
  check_devices(op, *stack, begin);
  if (is_any(op.operator_name().name, kMultiplies)) {
    keep_workspace();
  }
  Crossing crossing;
  auto generator = at::globalContext().defaultGenerator(kDevice);
  for (size_t i = begin; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isStorage()) {
      value = crossing.to_cpu(value.toStorage());
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      value = IValue();
    } else {
      value = with_tensors(value, [&](const Tensor& one) { return crossing.to_cpu(one); });
    }
  }
  {
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      drawing.emplace(generator);
    }
    call_on_cpu(op, stack);
  }
  crossing.bring_back_changes();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    (*stack)[i] = with_tensors((*stack)[i], [&](const Tensor& one) { return crossing.to_device(one); });
  }
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// The kernel that torch takes on Hopper: cuDNN's for halves, flash for those that it does not take, else memory-efficient,
// else single steps.
int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double, bool,
    std::optional<double>, bool grouped) {
  const auto& context = at::globalContext();
  const auto width = query.size(-1);
  const bool plain = query.dim() == 4 && width == value.size(-1);
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (plain && half && width <= 128 && context.userEnabledCuDNNSDP()) {
    return static_cast<int64_t>(at::SDPBackend::cudnn_attention);
  }
  if (plain && half && !mask && width <= 256 && context.userEnabledFlashSDP()) {
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  }
  if (plain && query.size(1) == key.size(1) && context.userEnabledMemEfficientSDP()) {
    return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  }
  return static_cast<int64_t>(at::SDPBackend::math);
}

const at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)> attention_choice(
    at::native::_fused_sdp_choice_stub, &choose_attention);

int64_t fused_sdp_choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool grouped) {
  return choose_attention(query, key, value, mask, dropout, causal, scale, grouped);
}

Tensor lent_to_cpu(const Tensor& tensor) {
  return Crossing().to_cpu(tensor);
}

Tensor given_to_device(const Tensor& tensor) {
  return Crossing().to_device(tensor);
}

const std::set<std::string> kComposite = {"aten::copy_", "aten::convolution", "aten::convolution_backward"};

}  // namespace

// What this file does otherwise, and what Python does: attention.
const std::set<std::string> kOwn = {"aten::empty", "aten::empty_strided", "aten::_fused_sdp_choice"};

TORCH_LIBRARY(emulated_cuda, m) {
  m.def("lent_to_cpu(Tensor tensor) -> Tensor", lent_to_cpu);
  m.def("given_to_device(Tensor tensor) -> Tensor", given_to_device);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
  // Composites of torch's come before a fallback: where the CPU has a kernel of its own, that is taken.
  for (const auto& op : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (op.name.rfind("aten::", 0) == 0 && !kOwn.count(op.name)) {
      m.impl(toString(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
  }
  for (const auto& name : kComposite) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

extern "C" void emulated_cuda_forbid_waiting(bool on) {
  waiting_is_an_error = on;
}
