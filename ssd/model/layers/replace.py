"""Replacement of a model's layers by faster layers that compute the same function."""

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
"""The length in tokens of the KV cache slots in a model's startup test: a test text of 13 tokens and one more token."""


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return a model's logits, float32[T, V], for each text of `probe_texts`, each in a forward pass of its own."""
    return [
        model(input_ids=torch.from_numpy(row[None]).to(model.device), use_cache=False).logits[0].float()
        for row in probe_texts(model)
    ]


def probe_texts(model: PreTrainedModel) -> npt.NDArray[np.int64]:
    """Return two texts of random token ids, int64[2, T], for tests of a model; the texts are the same in every call."""
    vocab_size = model.config.get_text_config().vocab_size
    random: Any = np.random.default_rng(0)
    return np.asarray(random.integers(3, max(vocab_size, 5), (2, PROBE_LENGTH - 1)).clip(max=vocab_size - 1), np.int64)


log = logging.getLogger(__name__)

_COLLECTOR = "transformers.utils.output_capturing"

MAX_LOOP_ELEMENTS = 1 << 16
"""The maximum number of input elements for SSD's loops on one CPU core; torch computes larger inputs on all cores."""


MAX_ERROR = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""The maximum relative error of a faster layer's output, by dtype. It allows for one or two differences in rounding."""


MAX_CHANGE = 1e-3
MAX_CHANGE_LOW_PRECISION = 0.2
"""The maximum relative change of a model's logits by the replacement of its layers, in bfloat16 or float16.

Two ways to round to bfloat16 change the logits by up to 0.1. A wrong mask, position or state changes them by about 1.
"""


class Replaced(NamedTuple):
    """A layer or ``forward`` method that was replaced by a faster one, with the data for restoring the original."""

    parent: Any  # the module that contains it
    name: str
    make_original: Callable[[], Any]  # returns the original


LayerReplacement = Callable[[nn.Module], Iterator[Replaced]]
"""A function that replaces all layers of one kind in a model, and yields for each a `Replaced` record to restore it."""


def replace_layers(
    model: nn.Module,
    kinds: Iterable[LayerReplacement],
    *,
    expected: Sequence[torch.Tensor],
    tolerance: float,
    compute: Callable[[Any], Sequence[torch.Tensor]] = reference_logits,
) -> bool:
    """Replace layers of a model or draft head by faster layers, and restore them if its output changes too much.

    Each function in ``kinds`` replaces the layers of one kind in place. Then ``compute`` computes the model's output.
    All layers are restored if an error is raised, or if the output differs from ``expected``, the output before, by a
    relative error of at least ``tolerance``. Returns whether faster layers are in use now; a second call replaces
    nothing and returns False. O(weights).
    """
    replaced: list[Replaced] = []
    try:
        for replace in kinds:
            for each in replace(model):
                replaced.append(each)  # at once, so that a later failure can restore it
        if not replaced:
            return False
        error = max(
            float((found - want).norm() / want.norm()) for found, want in zip(compute(model), expected, strict=True)
        )
        if error < tolerance:
            return True
        reason = f"logits differ by {error:.2g}"
    except AttributeError:
        reason = "the model reads the weights of its layers directly"
    except Exception as failure:  # from a compiler, for example
        reason = f"a forward pass with the faster layers fails ({first_line(failure)})"
    log.warning("%s keeps its original layers, which are slower than SSD's: %s", type(model).__name__, reason)
    for parent, name, make_original in replaced:
        setattr(parent, name, make_original())
    return False


def swap(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> Iterator[Replaced]:
    """Replace each module of a model for which ``make`` returns a new module; yields a `Replaced` record for each."""
    for parent in parents(model):
        for name, child in list(parent.named_children()):
            if (made := make(child)) is not None:
                setattr(parent, name, made)
                yield Replaced(parent, name, lambda child=child: child)  # type: ignore[misc]


def swap_forward(module: nn.Module, forward: Callable[..., Any]) -> Replaced:
    """Replace a module's ``forward`` method by a function that gets the module as its first argument."""
    module.forward = MethodType(forward, module)
    return Replaced(module, "forward", lambda: MethodType(type(module).forward, module))


def has_plain_forward(module: nn.Module) -> bool:
    """Return whether a module's ``forward`` has one argument, is that of the module's class, and has no hooks."""
    parameters = inspect.signature(module.forward).parameters
    return "forward" not in vars(module) and not has_hooks(module) and len(parameters) == 1


def parents(model: nn.Module) -> list[nn.Module]:
    """Return the modules that contain other modules, as a list, so that a loop over it may replace modules."""
    return [module for module in model.modules() if next(module.children(), None) is not None]


def agrees(found: torch.Tensor, wanted: torch.Tensor, max_error: float) -> bool:
    """Return whether two tensors have the same shape, and ``found`` has a relative error of at most ``max_error``.

    The relative error is norm(found - wanted) / norm(wanted).
    """
    if found.shape != wanted.shape:
        return False
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm()) <= max_error * float(wanted.norm())


def is_plain(module: Any, dtypes: Sequence[torch.dtype]) -> TypeGuard[nn.Linear]:
    """Return whether a module is an ``nn.Linear`` of one of ``dtypes``: no subclass, not quantised, without hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in dtypes
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks, except those by which transformers collects hidden states.

    transformers leaves its hooks on the modules after a forward pass has returned hidden states.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != _COLLECTOR for hook in hooks)


# The names of layers that read the same input in nearly every model. If they do not, joining them only costs time.
SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def siblings(model: nn.Module, is_one: Callable[[Any], bool]) -> Iterator[tuple[nn.Module, dict[str, nn.Linear]]]:
    """Yield each module that contains linear layers with the same input, and these layers by name.

    An example is an attention module with q_proj, k_proj and v_proj. The layers can be joined to one layer: they have
    the same input size, dtype and device, and all or none have a bias. ``is_one`` returns whether a layer may be
    joined.
    """
    for parent in parents(model):
        for names in SIBLINGS:
            found: dict[str, Any] = {name: each for name in names if is_one(each := getattr(parent, name, None))}
            weights = {id(each.weight): each.weight for each in found.values()}
            kinds = {(each.in_features, each.bias is None) for each in found.values()}
            placements = {(weight.dtype, weight.device) for weight in weights.values()}
            if len(weights) == len(names) and len(kinds) == len(placements) == 1:
                yield parent, found


class Joint(ABC):
    """Linear layers with the same input, such as q_proj, k_proj and v_proj; the first call computes all of them."""

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    @abstractmethod
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute all layers on ``x``, [..., in], and return their concatenated outputs, [..., sum of output sizes]."""

    def output(self, x: torch.Tensor, member: int) -> torch.Tensor:
        """Return the output of layer number ``member`` for ``x``; the first call for an input computes all layers.

        Call it once per layer and input, because a call releases the layer's output.
        """
        if len(self.sizes) == 1:
            return self.compute(x)
        found = self._outputs[member] if x is self._input else None
        if found is None:
            self._outputs = list(torch.split_with_sizes(self.compute(x), self.sizes, -1))
            self._input, found = x, self._outputs[member]
            assert found is not None
        self._outputs[member] = None
        if not any(output is not None for output in self._outputs):
            self._input = None  # release the pass's tensors
        return found
