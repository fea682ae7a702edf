"""Whether a model is its blocks, and what each block uses: found out on copies, with the first micro-batch.

The blocks as they will be shipped, each by itself, must give the bits of ``model(x)`` in eval mode. Where blocks are
functions, or share modules, they are also watched: which parameters they use, in eval and in train mode, and whether
one relies on an attribute that another has set -- blocks share nothing but tied parameters and what they return.

Nothing of this is seen outside: neither the model, nor the batch, nor random generators, nor torch's switches change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from slurm_jap import draws, shipping, trees
from slurm_jap.blocks import HOW_TO_PASS, Block, Profile, autocasting, call_block, describe
from slurm_jap.errors import UsageError
from slurm_jap.shipment import BlockShipment, modules_of, named_buffers, named_parameters
from slurm_jap.switches import Switches

_SEED = draws.key(0, 0, 0, 0, draws.EVALUATION)


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A model, its blocks and its loss as one graph of objects."""

    model: nn.Module
    blocks: list[Block]
    loss_fn: Callable[..., Any]
    world: shipping.World

    def twin(self) -> Whole:
        """A copy that shares nothing with this one."""
        data, found = shipping.dump((self.model, self.blocks, self.loss_fn), "the model, its blocks or loss_fn")
        world = shipping.World()
        model, blocks, loss_fn = shipping.load(data, [t.clone() for t in found], world=world)
        return Whole(model, blocks, loss_fn, world)

    def modules(self) -> list[nn.Module]:
        """Every module in it, those of blocks that the model does not hold included, each once."""
        found = {id(m): m for m in modules_of(self.model, self.loss_fn)}
        for block in self.blocks:
            if isinstance(block, nn.Module):
                found.update({id(m): m for m in block.modules()})
        return list(found.values())

    def names(self) -> dict[int, str]:
        """``id`` of every parameter and buffer to its name."""
        named = {**named_parameters(self.model, self.loss_fn), **named_buffers(self.model, self.loss_fn)}
        return {id(tensor): name for name, tensor in named.items()}

    def loss_sees_model(self) -> bool:
        """Whether the loss holds the model, or a part of it."""
        of_model = {id(t) for t in [*self.model.parameters(), *self.model.buffers()]}
        return bool(_tensors_in(self.loss_fn, "loss_fn") & of_model)

    def blocks_may_meet(self) -> bool:
        """Whether a block might use what belongs to another: functions, shared modules, hidden references."""
        modules: set[int] = set()
        names = self.names()
        for number, block in enumerate(self.blocks):
            if not isinstance(block, nn.Module):
                return True
            mine = {id(m) for m in block.modules()}
            held = {id(t) for t in [*block.parameters(), *block.buffers()]}
            if mine & modules or any(i in names for i in _tensors_in(block, f"block {number}") - held):
                return True
            modules |= mine
        return False


def _tensors_in(obj: Any, what: str) -> set[int]:
    seen: set[int] = set()

    def note(tensor: Tensor) -> bool:
        seen.add(id(tensor))
        return True

    shipping.dump(obj, what, note)
    return seen


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """How a pass is run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    """Ignored without ``with_loss``."""
    with_loss: bool
    autocast: torch.dtype | None
    device: torch.device

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The micro-batch; a block may do with it what it likes."""
        args, kwargs = trees.to_device(trees.as_sent((self.args, self.kwargs)), self.device)
        return args, kwargs

    def targets(self) -> Any:
        """The target, likewise."""
        return trees.to_device(trees.as_sent(self.target), self.device)


@contextlib.contextmanager
def unseen(device: torch.device, *, grad: bool = False) -> Iterator[None]:
    """Run the user's code unnoticed: it prints, warns and logs nothing; generators and switches are put back.

    Args:
        grad: whether gradients may be taken in it.
    """
    switches, logging_level = Switches.current(), logging.root.manager.disable
    out, err = _Silence(sys.stdout), _Silence(sys.stderr)
    try:
        logging.disable(sys.maxsize)
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
            draws.preserved(device),
            torch.inference_mode(False),
            torch.set_grad_enabled(grad),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging_level)
        switches.apply(Switches.current())


class _Silence(io.TextIOBase):
    """Swallows what this thread writes; others go on writing to where they did."""

    def __init__(self, beneath: Any) -> None:
        self._beneath, self._thread = beneath, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            self._beneath.write(text)
        return len(text)

    def flush(self) -> None:
        if threading.get_ident() != self._thread:
            self._beneath.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)


def output_of(whole: Whole, how: Pass) -> Any:
    """``model(x)`` in eval mode."""
    twin = whole.twin()
    twin.model.eval()
    args, kwargs = trees.moved(how.inputs(), twin.world)
    draws.reseed(_SEED, how.device)
    with autocasting(how.autocast, how.device):
        return twin.model(*args, **kwargs)


# --- what blocks use --------------------------------------------------------------------------------------------------


class _Touched(TorchFunctionMode):
    """Notes every tensor that a torch function is given."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()
        self._keep: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(args)
        if kwargs:
            self._note(tuple(kwargs.values()))
        return func(*args, **(kwargs or {}))

    def _note(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.ids.add(id(value))
                self._keep.append(value)  # an id is only unique while its tensor lives
            elif isinstance(value, (list, tuple)):
                self._note(value)


def uses_of(whole: Whole, how: Pass) -> list[set[str]]:
    """For every block, and last the loss, the parameters and buffers that it uses beyond what its modules hold.

    Raises:
        UsageError: a block or the loss relies on what another block sets outside of what it returns.
    """
    uses: list[set[str]] = [set() for _ in range(len(whole.blocks) + 1)]
    if whole.blocks_may_meet() or whole.loss_sees_model():
        for training in (False, True):
            with contextlib.suppress(_Unwatchable):
                _Watched(whole.twin(), how, training=training).run(uses)
    return uses


class _Unsteady(Exception):
    """The model gives another output each time: whether it is its blocks cannot be said to the bit."""


class _Unwatchable(Exception):
    """The user's code failed: it will do so again where it can be reported as what it is."""


_NO_ATTRIBUTES = frozenset(nn.Module().__dict__)


class _Watched:
    """One pass, block by block: what one sets is hidden from the others."""

    def __init__(self, whole: Whole, how: Pass, *, training: bool) -> None:
        self._whole, self._how, self._training = whole, how, training
        self._modules = whole.modules()
        named = {**named_parameters(whole.model, whole.loss_fn), **named_buffers(whole.model, whole.loss_fn)}
        self._keep = list(named.values())  # an id is only unique while its tensor lives
        self._written: dict[tuple[int, str], int] = {}
        """(place of a module in the list, attribute) -> the block that set it."""
        self._buffers_written: dict[str, int] = {}

    def run(self, uses: list[set[str]]) -> None:
        how, value = self._how, trees.moved(self._how.inputs(), self._whole.world)
        for module in self._modules:
            module.training = self._training
        draws.reseed(_SEED, how.device)
        for number, block in enumerate(self._whole.blocks):
            value = self._act(number, describe(block), functools.partial(call_block, block, number, value), uses)
        if how.with_loss:
            last = len(self._whole.blocks)
            target = trees.moved(how.targets(), self._whole.world)
            self._act(last, "loss_fn", lambda: self._whole.loss_fn(value, target), uses)
        self._judge_buffers(uses)

    def _act(self, number: int, name: str, call: Callable[[], Any], uses: list[set[str]]) -> Any:
        hidden = self._hide(number)
        attributes, buffers, names = self._attributes(), self._buffers(), self._names()
        touched = _Touched()
        try:
            with autocasting(self._how.autocast, self._how.device), touched:
                return call()
        except Exception as error:
            self._judge(number, name, hidden, error)
            if self._training or number == len(self._whole.blocks):
                raise _Unwatchable from error
            raise _failed(self._whole, number, name, error) from error
        finally:
            uses[number] |= {names[i] for i in touched.ids if i in names}
            for place, before in enumerate(attributes):
                for attribute, value in _plain(self._modules[place]).items():
                    if attribute not in before or not _same(before[attribute], value):
                        self._written[place, attribute] = number
            for name_of, state in self._buffers().items():
                if buffers.get(name_of) != state:
                    self._buffers_written.setdefault(name_of, number)
                    uses[number].add(name_of)
            for place, attribute, value in hidden:
                self._modules[place].__dict__.setdefault(attribute, value)

    def _hide(self, number: int) -> list[tuple[int, str, Any]]:
        hidden = []
        for (place, attribute), writer in self._written.items():
            values = self._modules[place].__dict__
            if writer != number and attribute in values:
                hidden.append((place, attribute, values.pop(attribute)))
        return hidden

    def _judge(self, number: int, name: str, hidden: list[tuple[int, str, Any]], error: Exception) -> None:
        if not isinstance(error, (AttributeError, KeyError)):
            return
        for place, attribute, _ in hidden:
            if f"'{attribute}'" in str(error):
                writer = self._written[place, attribute]
                who = "loss_fn" if number == len(self._whole.blocks) else f"block {number} ({name})"
                raise UsageError(
                    f"{who} reads attribute {attribute!r} of a {type(self._modules[place]).__name__}, which block "
                    f"{writer} ({describe(self._whole.blocks[writer])}) sets; blocks and loss may lie in different "
                    "processes and see only what the block before them returned: return it as part of the output"
                ) from error

    def _judge_buffers(self, uses: list[set[str]]) -> None:
        names = self._names()
        for name, writer in self._buffers_written.items():
            users = [n for n, used in enumerate(uses) if name in used]
            users += [
                n
                for n, block in enumerate(self._whole.blocks)
                if n not in users
                and isinstance(block, nn.Module)
                and any(names.get(id(buffer)) == name for buffer in block.buffers())
            ]
            if len(users) > 1:
                raise UsageError(
                    f"buffer {name!r} is changed by block {writer} and used by blocks {sorted(users)}, which may lie "
                    "in different processes; use it in one block only, or give each block a buffer of its own"
                )

    def _names(self) -> dict[int, str]:
        first = self._whole.names()
        self._keep += [b for b in named_buffers(self._whole.model, self._whole.loss_fn).values() if id(b) in first]
        return first

    def _attributes(self) -> list[dict[str, Any]]:
        return [_plain(module) for module in self._modules]

    def _buffers(self) -> dict[str, tuple[int, int]]:
        named = named_buffers(self._whole.model, self._whole.loss_fn)
        return {name: (id(tensor), tensor._version) for name, tensor in named.items()}


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _NO_ATTRIBUTES}


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


# --- the blocks as they will be shipped -------------------------------------------------------------------------------


def check(whole: Whole, shipped: Sequence[BlockShipment], expected: Any, how: Pass) -> tuple[Any, list[Profile], str]:
    """Require that the shipped blocks, without the loss, give the bits of ``expected``; notes what each costs.

    Returns:
        Their output, one profile per block, and what the user should be warned of.

    Raises:
        UsageError: they do not, or one failed on what the one before it returned.
    """
    profiles: list[Profile] = []
    warning = ""
    try:
        value = _check(whole, shipped, expected, how, profiles)
    except _Unsteady as error:
        warning = (
            f"jap: model {type(whole.model).__name__} gives another output each time it is run on one batch ({error}"
            "), so that it cannot be compared with its blocks, and its numbers differ from run to run"
        )
        value = _compose(whole, shipped, how, profiles, count=False)
    for block, profile in zip(shipped, profiles, strict=False):
        block.cost = profile.cost
    return value, profiles, warning


def _check(whole: Whole, shipped: Sequence[BlockShipment], expected: Any, how: Pass, profiles: list[Profile]) -> Any:
    difference = "?"
    with contextlib.suppress(UsageError):
        value = _compose(whole, shipped, how, profiles, count=True)
        difference = differing(expected, value)
    if not difference:
        return value
    try:  # perhaps that was only because operations were counted
        value = _compose(whole, shipped, how, profiles, count=False)
        difference = differing(expected, value)
    except _Failed as error:
        _require_composition(whole, expected, how)
        difference, cause = str(error.__cause__), error.__cause__
    else:
        cause = None
    if difference:
        _require_composition(whole, expected, how)
        raise UsageError(
            f"the blocks of model {type(whole.model).__name__} work together, but not each by itself: {difference}; "
            "blocks may lie in different processes and see only what the block before them returned: return what one "
            "of them changes as part of its output"
        ) from cause
    return value


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what operations are given, parameters apart, each storage once."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._seen: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in trees.tensors((args, kwargs or {})):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors have none
                storage = leaf.untyped_storage()  # held, so that no other comes to lie in its place
                self._seen[storage.data_ptr()] = storage
        return func(*args, **(kwargs or {}))

    def nbytes(self) -> int:
        return sum(storage.nbytes() for place, storage in self._seen.items() if place not in self._parameters)


def _compose(whole: Whole, shipped: Sequence[BlockShipment], how: Pass, profiles: list[Profile], *, count: bool) -> Any:
    profiles.clear()
    value: Any = how.inputs()
    draws.reseed(_SEED, how.device)
    for block in shipped[: len(whole.blocks)]:
        world = shipping.World()
        call, modules, parameters, _ = shipping.load(block.data, [t.clone() for t in block.tensors], world=world)
        for module in [m for _, m in modules] + (list(call.modules()) if isinstance(call, nn.Module) else []):
            module.training = False
        flops, storages = FlopCounterMode(display=False), _Storages(parameters.values())
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(autocasting(how.autocast, how.device))
                if count:
                    stack.enter_context(storages)
                    stack.enter_context(flops)
                value = call_block(call, block.number, trees.moved(value, world))
        except Exception as error:
            raise _failed(whole, block.number, describe(whole.blocks[block.number]), error) from error
        trees.encode(value, f"what block {block.number} returns")  # wherever the cut will be
        value = trees.cut_off(value)
        elements = sum(t.numel() for t in [*trees.tensors(value), *parameters.values()])
        profiles.append(
            Profile(
                cost=float(flops.get_total_flops()) + elements,
                activation_bytes=storages.nbytes(),
                output_bytes=sum(map(trees.nbytes, trees.tensors(value))),
            )
        )
    return value


def _require_composition(whole: Whole, expected: Any, how: Pass) -> None:
    """Require that the blocks of the whole, sharing what they like, give ``expected``."""
    twin = whole.twin()
    for module in twin.modules():
        module.training = False
    value: Any = trees.moved(how.inputs(), twin.world)
    draws.reseed(_SEED, how.device)
    for number, block in enumerate(twin.blocks):
        try:
            with autocasting(how.autocast, how.device):
                value = call_block(block, number, value)
        except Exception as error:
            raise _failed(whole, number, describe(block), error) from error
    difference = differing(expected, value)
    if difference:
        itself = differing(expected, output_of(whole, how))
        if itself:
            raise _Unsteady(itself)
        raise UsageError(
            f"model {type(whole.model).__name__} is not the composition of its {len(whole.blocks)} blocks: "
            f"{difference}; it does something outside its blocks: {HOW_TO_PASS}"
        )


class _Failed(UsageError):
    """A block raised."""


def _failed(whole: Whole, number: int, name: str, error: Exception) -> _Failed:
    return _Failed(
        f"block {number} ({name}) failed on {'the batch' if number == 0 else 'the output of the block before it'}: "
        f"{type(error).__name__}: {error}; model {type(whole.model).__name__} does something between its blocks: "
        f"{HOW_TO_PASS}"
    )


# --- equality ---------------------------------------------------------------------------------------------------------


def differing(expected: Any, found: Any) -> str:
    """In words, where two output trees differ; empty where they do not."""
    left, right = list(trees.leaves(expected, "output")), list(trees.leaves(found, "output"))
    if [path for path, _ in left] != [path for path, _ in right]:
        return f"the model returns {_shape_of(expected)}, the blocks return {_shape_of(found)}"
    for (path, a), (_, b) in zip(left, right, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{path} is {_shape_of(a)} from the model, {_shape_of(b)} from the blocks"
            if not same_bits(a, b):
                gap = (a.double() - b.double()).abs().max().item() if a.is_floating_point() else float("nan")
                return f"{path} differs by up to {gap:.3g} on the first micro-batch"
        elif type(a).__qualname__ != type(b).__qualname__ or (_is_plain(a) and a != b and a == a):
            return f"{path} is {a!r} from the model, {b!r} from the blocks"
    return ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """``torch.equal``, but NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return torch.equal(a.isnan(), b.isnan()) and bool(((a == b) | a.isnan()).all())


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _shape_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
