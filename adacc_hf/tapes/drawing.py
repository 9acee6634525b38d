"""Which operators draw random numbers (rule R5)."""

from __future__ import annotations

from typing import Any

import torch

from adacc_hf.tapes.tape import leaves


class Drawing:
    """Finds out whether one operator draws random numbers, by the state of the generator before and after.

    The tag alone says too much: fused attention carries it, and draws only with dropout. Operators from outside torch
    may lack it.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = leaves(args, kwargs)
        self._own_generator = any(isinstance(leaf, torch.Generator) for leaf in given)
        self._device = torch.device("cpu")
        self._before: bytes | tuple[int, int] | None = None
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            devices = [leaf for leaf in given if isinstance(leaf, torch.device)]  # one that is asked for comes first
            devices += [leaf.device for leaf in given if isinstance(leaf, torch.Tensor)]
            self._device = devices[0] if devices else self._device
            self._before = self._state()

    def happened(self) -> bool:
        return self._own_generator or (self._before is not None and self._has_moved())

    def _has_moved(self) -> bool:
        return self._state() != self._before

    def _state(self) -> bytes | tuple[int, int]:
        """The default generator's state; reading it does not synchronise, and no tensor of it stays."""
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            generator = torch.cuda.default_generators[index]
            return generator.initial_seed(), generator.get_offset()
        return torch._C.TensorBase.numpy(torch.get_rng_state()).tobytes()  # blocks' own calls of .numpy() are watched
