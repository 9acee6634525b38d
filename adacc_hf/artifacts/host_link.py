"""Cost of payloads in host memory: their bytes divided by the bandwidth of copies between device and host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adacc_hf.kernels._host_payloads import HOST, MOST_TENSORS, most_pool_bytes, on_host

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import CodecOption


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Connection between a device and the pinned memory of its host: speed of copies, and limits on stored bytes."""

    to_host_bytes_per_ms: float
    to_device_bytes_per_ms: float
    copy_ms: float
    """Time of a small copy, added to the time of each copy."""
    limit_bytes: int | None = None
    """Maximum number of bytes that one block may store in host memory, or None."""

    def moved(self, option: CodecOption) -> CodecOption:
        """Return the codec `option`, changed to store its payload in host memory, with the times of copies added.

        The option `host` stores the tensor unencoded. The bytes in host memory include the largest possible rounding of
        the pool of pinned memory, so a limit on these bytes also holds for the pool.
        """
        is_encoded = option.codec != HOST
        return replace(
            option,
            codec=on_host(option.codec) if is_encoded else HOST,
            nbytes=0,
            host_bytes=most_pool_bytes(option.nbytes, MOST_TENSORS if is_encoded else 1),
            staging_bytes=option.nbytes if is_encoded else 0,
            encode_ms=option.encode_ms + self.copy_ms + option.nbytes / self.to_host_bytes_per_ms,
            decode_ms=option.decode_ms + self.copy_ms + option.nbytes / self.to_device_bytes_per_ms,
        )
