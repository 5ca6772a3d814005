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
"""The length in tokens of a KV cache slot in the startup test, enough for one test text and one more token."""


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the unmodified model's logits, float32[T, V], for each text of `probe_texts`, without batching."""
    return [
        model(input_ids=torch.from_numpy(row[None]).to(model.device), use_cache=False).logits[0].float()
        for row in probe_texts(model)
    ]


def probe_texts(model: PreTrainedModel) -> npt.NDArray[np.int64]:
    """Return two texts of random token ids, int64[2, T], for tests of a model; all calls return the same texts."""
    vocab_size = model.config.get_text_config().vocab_size
    random: Any = np.random.default_rng(0)
    return np.asarray(random.integers(3, max(vocab_size, 5), (2, PROBE_LENGTH - 1)).clip(max=vocab_size - 1), np.int64)


log = logging.getLogger(__name__)

_COLLECTOR = "transformers.utils.output_capturing"

MOST_NUMBERS = 1 << 16
"""The maximum number of input elements for a compiled loop on one core; for more, torch uses several cores."""


MOST_ERROR = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""The maximum relative error of a replaced layer's output, by dtype: the error if one or two roundings differ."""


MOST_CHANGE = 1e-3
MOST_CHANGE_LOW_PRECISION = 0.2
"""The maximum relative error of a model's logits in bfloat16 or float16 after its layers have been replaced.

A wrong mask, position or state causes an error of about 1; two ways to round to bfloat16 differ by up to 0.1.
"""


class Replaced(NamedTuple):
    """A layer, or a layer's ``forward`` method, that was replaced by a faster one and can be restored."""

    parent: Any  # the module that contains it
    name: str
    again: Callable[[], Any]  # returns the original


LayerReplacement = Callable[[nn.Module], Iterator[Replaced]]
"""A function that replaces a model's layers of one kind in place and yields a `Replaced` record for each layer."""


def replace_layers(
    model: nn.Module,
    kinds: Iterable[LayerReplacement],
    *,
    expected: Sequence[torch.Tensor],
    tolerance: float,
    compute: Callable[[Any], Sequence[torch.Tensor]] = reference_logits,
) -> bool:
    """Replace layers of a model by faster layers, and restore all layers if the output changes by more than rounding.

    The model, or draft head, is changed in place; ``expected`` is its output before, and ``compute`` computes its
    output. ``tolerance`` is the maximum relative error that is attributed to rounding. Returns whether layers were
    replaced; a second call does nothing. O(weights).
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
    log.warning("the layers of %s are not replaced by faster ones: %s", type(model).__name__, reason)
    for parent, name, again in replaced:
        setattr(parent, name, again())
    return False


def swap(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> Iterator[Replaced]:
    """Replace each module of a model for which ``make`` returns a replacement; yields a `Replaced` for each module."""
    for parent in parents(model):
        for name, child in list(parent.named_children()):
            if (made := make(child)) is not None:
                setattr(parent, name, made)
                yield Replaced(parent, name, lambda child=child: child)  # type: ignore[misc]


def swap_forward(module: nn.Module, forward: Callable[..., Any]) -> Replaced:
    """Replace a module's ``forward`` by a function, whose first argument is the module."""
    module.forward = MethodType(forward, module)
    return Replaced(module, "forward", lambda: MethodType(type(module).forward, module))


def is_function(module: nn.Module) -> bool:
    """Return whether a module maps one tensor to one tensor by the ``forward`` of its class, without hooks."""
    parameters = inspect.signature(module.forward).parameters
    return "forward" not in vars(module) and not has_hooks(module) and len(parameters) == 1


def parents(model: nn.Module) -> list[nn.Module]:
    """List all modules that contain other modules; the contained modules may then be replaced during the iteration."""
    return [module for module in model.modules() if next(module.children(), None) is not None]


def agrees(found: torch.Tensor, wanted: torch.Tensor, most_error: float) -> bool:
    """Return whether two tensors have the same shape and a relative error of at most ``most_error``.

    The relative error is the norm of the difference divided by the norm of ``wanted``.
    """
    if found.shape != wanted.shape:
        return False
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm()) <= most_error * float(wanted.norm())


def is_plain(module: Any, dtypes: Sequence[torch.dtype]) -> TypeGuard[nn.Linear]:
    """Return whether a module is exactly ``nn.Linear``, of one of ``dtypes``, without quantisation or hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in dtypes
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks other than those with which transformers collects outputs.

    transformers does not remove its hooks after a forward pass has returned hidden states.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != _COLLECTOR for hook in hooks)


# The names of layers that read the same input in nearly every model. If they do not, joining them only costs time.
SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def siblings(model: nn.Module, is_one: Callable[[Any], bool]) -> Iterator[tuple[nn.Module, dict[str, nn.Linear]]]:
    """Yield each module that has linear layers with the same input, such as q, k and v, with these layers by name.

    The layers have the same number of inputs, and all or none have a bias, so that they can be computed as one layer.
    ``is_one`` decides whether a single layer is eligible.
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
    """Linear layers with the same input, such as q, k and v, computed together when the first of them is called."""

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    @abstractmethod
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute all joined layers on ``x``, [..., in]; returns their outputs concatenated, [..., outputs of all]."""

    def output(self, x: torch.Tensor, member: int) -> torch.Tensor:
        """Return the output of the joined layer with index ``member`` for ``x``; call it once per layer and input."""
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
