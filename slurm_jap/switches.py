"""torch's global switches as a value: the engine sets a member's own before each of its actions.

A member that calls ``torch.set_default_dtype(torch.float64)`` or ``torch.set_num_threads(4)`` means itself alone.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Switches:
    """The global state of torch that changes numbers."""

    default_dtype: torch.dtype
    threads: int
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cudnn_tf32: bool
    mkldnn: bool

    @classmethod
    def current(cls) -> Switches:
        """Read them all (about 2 us)."""
        return cls(
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
            bool(torch.backends.mkldnn.enabled),
        )

    def apply(self, now: Switches) -> None:
        """Set what differs from ``now``."""
        if self == now:
            return
        if self.default_dtype != now.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if self.threads != now.threads:
            torch.set_num_threads(self.threads)
        if (self.deterministic, self.deterministic_warn_only) != (now.deterministic, now.deterministic_warn_only):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        if self.matmul_precision != now.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        if self.cudnn_tf32 != now.cudnn_tf32:
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        if self.mkldnn != now.mkldnn:
            torch.backends.mkldnn.enabled = self.mkldnn  # type: ignore[assignment]
