"""Replacing layers of a model by faster ones that compute the same."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ssd.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_LENGTH = 14
"""Positions of a slot that holds a text of the probe and one token more."""


@torch.inference_mode()
def plain_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """The model's own logits for the probe, computed without any cache, one row at a time: float32[T, V] each."""
    return [
        model(input_ids=torch.from_numpy(row[None]).to(model.device), use_cache=False).logits[0].float()
        for row in probe_texts(model)
    ]


def probe_texts(model: PreTrainedModel) -> npt.NDArray[np.int64]:
    """Token ids drawn at random from the model's vocabulary, the same every time: int64[2, T]."""
    vocab_size = model.config.get_text_config().vocab_size
    random: Any = np.random.default_rng(0)
    return np.asarray(random.integers(3, max(vocab_size, 5), (2, PROBE_LENGTH - 1)).clip(max=vocab_size - 1), np.int64)


log = logging.getLogger(__name__)

_COLLECTOR = "transformers.utils.output_capturing"

MOST_NUMBERS = 1 << 16
"""In an input of a compiled loop, which one core runs; several cores share torch's own operations on a larger one."""


MOST_ERROR = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""Of a layer's output, as a share of its norm: what rounding once or twice makes of it. By the type of the numbers."""


MOST_CHANGE = 1e-3
MOST_CHANGE_LOW_PRECISION = 0.2
"""Of logits. A wrong mask, position or state is off by about 1; two ways to round to bfloat16 by up to a tenth."""


class Replaced(NamedTuple):
    """Where in a model a layer, or what it computes, was replaced. ``again`` makes the one that was there."""

    parent: Any
    name: str
    again: Callable[[], Any]


Replace = Callable[[nn.Module], Iterator[Replaced]]
"""Replaces the layers of one kind in place, and says of each where it was."""


def replace_layers(
    model: nn.Module,
    kinds: Iterable[Replace],
    *,
    expected: Sequence[torch.Tensor],
    tolerance: float,
    say: Callable[[Any], Sequence[torch.Tensor]] = plain_logits,
) -> bool:
    """Replace layers of a model, or a head, and check that it still says what it said; else leave it as it was.

    ``expected`` : what it said before, by ``say``. ``tolerance`` : greatest relative error of it that is put down to
    rounding. True when layers were replaced. Changes ``model`` in place, and again does nothing. O(weights).
    """
    replaced: list[Replaced] = []
    try:
        for replace in kinds:
            for each in replace(model):
                replaced.append(each)  # one by one: what fails leaves those before it to be taken back
        if not replaced:
            return False
        error = max(
            float((found - want).norm() / want.norm()) for found, want in zip(say(model), expected, strict=True)
        )
        if error < tolerance:
            return True
        reason = f"logits differ by {error:.2g}"
    except AttributeError:
        reason = "the model computes with the weights of its layers itself"
    except Exception as failure:  # a compiler, say
        reason = f"with the faster ones a forward pass fails ({first_line(failure)})"
    log.warning("the layers of %s stay as they are, which is slower: %s", type(model).__name__, reason)
    for parent, name, again in replaced:
        setattr(parent, name, again())
    return False


def swap(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> Iterator[Replaced]:
    """Put what ``make`` makes of a layer in its place, where that is one; what was replaced, as it goes."""
    for parent in parents(model):
        for name, child in list(parent.named_children()):
            if (made := make(child)) is not None:
                setattr(parent, name, made)
                yield Replaced(parent, name, lambda child=child: child)  # type: ignore[misc]


def swap_forward(module: nn.Module, forward: Callable[..., Any]) -> Replaced:
    """Have a module compute by ``forward``, which is given it too; what was replaced."""
    module.forward = MethodType(forward, module)
    return Replaced(module, "forward", lambda: MethodType(type(module).forward, module))


def is_function(module: nn.Module) -> bool:
    """Whether it makes one tensor of one by its class's own rule, and nothing wants to know of it."""
    parameters = inspect.signature(module.forward).parameters
    return "forward" not in vars(module) and not has_hooks(module) and len(parameters) == 1


def parents(model: nn.Module) -> list[nn.Module]:
    """Modules that hold others. What they hold is not listed by itself, and so goes when it is replaced."""
    return [module for module in model.modules() if next(module.children(), None) is not None]


def agrees(found: torch.Tensor, wanted: torch.Tensor, most_error: float) -> bool:
    """Whether two tensors have one shape and differ by at most ``most_error``, as a share of the second's norm."""
    if found.shape != wanted.shape:
        return False
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm()) <= most_error * float(wanted.norm())


def is_plain(module: Any, dtypes: Sequence[torch.dtype]) -> TypeGuard[nn.Linear]:
    """An ``nn.Linear`` of one of ``dtypes``, and no subclass, with no quantised weight and no hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in dtypes
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether something wants to know of its passes, the library's own collector of outputs aside, which stays for good
    once a pass was asked for its hidden states."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != _COLLECTOR for hook in hooks)


SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers of one module that read the same input in nearly every model; where they do not it only costs time."""


def siblings(model: nn.Module, is_one: Callable[[Any], bool]) -> Iterator[tuple[nn.Module, dict[str, nn.Linear]]]:
    """Modules, and of each the linear layers by name that can be computed as one. ``is_one`` : of a layer, by itself.

    They have as many inputs each; with a bias all or none.
    """
    for parent in parents(model):
        for names in SIBLINGS:
            found: dict[str, Any] = {name: each for name in names if is_one(each := getattr(parent, name, None))}
            weights = {id(each.weight): each.weight for each in found.values()}
            kinds = {(each.in_features, each.bias is None) for each in found.values()}
            kept = {(weight.dtype, weight.device) for weight in weights.values()}
            if len(weights) == len(names) and len(kinds) == len(kept) == 1:
                yield parent, found


class Joint(ABC):
    """Linear layers that read the same input, computed as one when the first of them is asked."""

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    @abstractmethod
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """What all layers make of ``x``, [..., in], side by side: [..., outputs of all]."""

    def output(self, x: torch.Tensor, member: int) -> torch.Tensor:
        """What layer ``member`` makes of ``x``; each layer is asked once for an input."""
        if len(self.sizes) == 1:
            return self.compute(x)
        found = self._outputs[member] if x is self._input else None
        if found is None:
            self._outputs = list(torch.split_with_sizes(self.compute(x), self.sizes, -1))
            self._input, found = x, self._outputs[member]
            assert found is not None
        self._outputs[member] = None
        if not any(output is not None for output in self._outputs):
            self._input = None  # nothing of a pass stays behind
        return found
