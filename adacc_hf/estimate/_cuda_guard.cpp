// A device guard for CUDA that does nothing. torch without CUDA has none, and asks for one when autograd meets a tensor
// that says it is on CUDA, a fake one without memory too.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
