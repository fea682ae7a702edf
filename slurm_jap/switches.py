"""torch's global switches as a value: the engine sets a member's own before each of its actions.

A member that calls ``torch.set_default_dtype(torch.float64)`` or ``torch.set_num_threads(4)`` means itself alone. And
what a model switches in its forward holds for the rest of that block, no longer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_C: Any = torch._C
_TINY = 5e-324
_HAS_CUDA = torch.version.cuda is not None or torch.version.hip is not None
"""Whether this torch is built for it: the same in a member, which sees no device, and in the engine."""


class _Switch(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _precision_or_none() -> str | None:
    """None where the newer settings, which cover it, were used beside it: then torch does not tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _cudnn_tf32_or_none() -> bool | None:
    try:
        return bool(_C._get_cudnn_allow_tf32())
    except RuntimeError:
        return None


def _unless_none(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else function(value)


def _plain(names: str) -> list[_Switch]:
    """Pairs ``_get_x`` and ``_set_x`` of torch, where this torch has them."""
    return [
        _Switch(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}"))
        for name in names.split()
        if hasattr(_C, f"_get_{name}") and hasattr(_C, f"_set_{name}")
    ]


def _precisions() -> list[_Switch]:
    """Settings by backend and operation that newer torches have (``torch.backends.mkldnn.matmul.fp32_precision``)."""
    get, put = getattr(_C, "_get_fp32_precision_getter", None), getattr(_C, "_set_fp32_precision_setter", None)
    found = []
    for backend, operations in (("generic", "all"), ("mkldnn", "all conv rnn matmul"), ("cuda", "all conv rnn matmul")):
        if backend == "cuda" and not _HAS_CUDA:
            continue
        for operation in operations.split():
            with contextlib.suppress(RuntimeError, TypeError):
                get(backend, operation)  # type: ignore[misc]
                found.append(
                    _Switch(
                        lambda b=backend, o=operation: get(b, o),  # type: ignore[misc]
                        lambda value, b=backend, o=operation: put(b, o, value),  # type: ignore[misc]
                    )
                )
    return found


def _cuda() -> list[_Switch]:
    matmul: Any = torch.backends.cuda.matmul
    return [
        _Switch(_cudnn_tf32_or_none, _unless_none(_C._set_cudnn_allow_tf32)),
        *_plain("cudnn_benchmark cudnn_deterministic cublas_allow_fp16_accumulation"),
        _Switch(torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        _Switch(torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
        *(
            _Switch(functools.partial(getattr, matmul, name), functools.partial(setattr, matmul, name))
            for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        ),
    ]


_SWITCHES: tuple[_Switch, ...] = (
    _Switch(torch.get_default_dtype, torch.set_default_dtype),
    _Switch(torch.get_num_threads, torch.set_num_threads),
    _Switch(
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()), _set_deterministic
    ),
    _Switch(_precision_or_none, _unless_none(torch.set_float32_matmul_precision)),
    *_precisions(),
    *_plain(
        "deterministic_fill_uninitialized_memory mkldnn_enabled mkldnn_deterministic nnpack_enabled "
        "cpu_allow_fp16_reduced_precision_reduction"
    ),
    *(_cuda() if _HAS_CUDA else ()),
    _Switch(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    _Switch(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    _Switch(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    _Switch(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    _Switch(lambda: _TINY * 1.0 == 0.0, torch.set_flush_denormal),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Switches:
    """The global state of torch that changes numbers."""

    values: tuple[Any, ...]

    @classmethod
    def current(cls) -> Switches:
        """Read them all (a few us)."""
        return cls(tuple([switch.get() for switch in _SWITCHES]))

    def apply(self, now: Switches) -> None:
        """Set what differs from ``now``."""
        if self.values == now.values:
            return
        for switch, wanted, _ in zip(_SWITCHES, self.values, now.values, strict=True):
            if switch.get() != wanted:  # one switch may have moved another
                switch.set(wanted)
