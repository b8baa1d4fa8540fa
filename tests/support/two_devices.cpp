// An accelerator of two devices that computes on the CPU: real numbers, real device checks, no hardware.
// Operands of an op must lie on one device, as on CUDA; a 0-dim CPU tensor and CPU indices are let through.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>
#include <torch/library.h>

using namespace at;
namespace {

constexpr auto KIND = DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
thread_local DeviceIndex current = 0;

DeviceIndex exchange(DeviceIndex index) {
  TORCH_CHECK(index < COUNT, "there are ", COUNT, " devices");
  auto old = current;
  if (index >= 0) current = index;
  return old;
}

struct Memory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, Device(KIND, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override { return {KIND, exchange(device.index())}; }
  Device getDevice() const override { return {KIND, current}; }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice()); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = memory.allocate(bytes);
    memory.copy_data(data.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

Tensor made_empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}

Tensor made_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype_or_default(dtype));
}

// The same memory as a CPU tensor.
Tensor seen(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto made = from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(kCPU));
  return tensor.is_conj() ? made.conj() : made;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  NoGradGuard none;
  seen(to).copy_(seen(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  NoGradGuard none;
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

Scalar number(const Tensor& self) { return seen(self).item(); }

const Tensor& resized(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_source(Tensor& self, Storage source) {
  return set_storage(self, source, 0, {static_cast<int64_t>(source.nbytes() / self.itemsize())}, {1});
}

void check(const c10::OperatorHandle& op, const std::optional<Device>& first, const Tensor& tensor, bool indexes) {
  bool free = !tensor.defined() || (tensor.is_cpu() && (tensor.dim() == 0 || (indexes && isIntegralType(tensor.scalar_type(), true))));
  TORCH_CHECK(free || !first || tensor.device() == *first, "Expected all tensors to be on the same device, but found at least two devices, ",
              *first, " and ", tensor.device(), "! (", op.schema().name(), ")");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  bool indexes = name.find("index") != std::string::npos;
  std::vector<Tensor> tensors;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) for (const Tensor& each : value.toTensorVector()) tensors.push_back(each);
  }
  std::optional<Device> first;
  for (const auto& each : tensors)
    if (!first && each.defined() && (each.dim() > 0 || !each.is_cpu())) first = each.device();
  for (const auto& each : tensors) check(op, first, each, indexes);
  c10::OptionalDeviceGuard guard;
  for (const auto& each : tensors)
    if (each.defined() && each.device().type() == KIND) { guard.reset_device(each.device()); break; }
  native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", made_empty);
  m.impl("empty_strided", made_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("as_strided", native::as_strided_tensorimpl);
  m.impl("view", native::view);
  m.impl("_reshape_alias", native::_reshape_alias);
  m.impl("resize_", resized);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(KIND, &memory);
  m.def("current", [] { return static_cast<int>(current); });
  m.def("exchange", [](int index) { return static_cast<int>(exchange(static_cast<DeviceIndex>(index))); });
}
