// No-op device guard for CUDA. Autograd needs a guard for every tensor on CUDA, even a fake one without memory, and a
// torch that was built without CUDA has no guard.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
