"""New weights for a model that is driven already, put where its layers hold the old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd.errors import ModelError
from ssd.model.layers.adapted_linear import AdaptedLinear
from ssd.model.layers.packed_embedding import PackedEmbedding
from ssd.model.layers.packed_linear import FusedMember, PackedLinear
from ssd.model.layers.vector_layers import FusedNorm
from ssd.model.loading.threads import one_thread_if_small


class Place(NamedTuple):
    """One weight of a model. ``names`` : what its ``state_dict`` calls it, several where layers share it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


Held = tuple[Sequence[Place], Callable[..., object]]
"""Weights that lie together, and what puts new ones in their place, a tensor for each."""


@torch.inference_mode()
def take_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Have a model compute with other weights, whatever layers have taken the place of its own.

    weights : named as in the ``state_dict`` of such a model in transformers, every one of it, of a shared weight one
    name at least; of the shapes and types that the model has, on any device. They are copied, and what is recorded of
    passes stays valid. Raises ModelError, which names the weight, before anything is changed. O(weights), and memory
    for the largest layer more.
    """
    if any(isinstance(module, AdaptedLinear) for module in model.modules()):
        raise ModelError("this model has adapters, which were made for the weights it has: open it without them")
    held = list(_held(model))
    given = [[_given(place, weights) for place in places] for places, _put in held]
    known = {name for places, _ in held for place in places for name in place.names}
    if unknown := sorted(weights.keys() - known):
        raise ModelError(
            f"{type(model).__name__} has no weight {unknown[0]}: give the state_dict of a model of this architecture, "
            "without a wrapper's prefix"
        )
    with one_thread_if_small(model):  # as when it was opened: so layers are laid out in the same order
        for (_places, put), found in zip(held, given, strict=True):
            put(*found)


def _given(place: Place, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name = next((name for name in place.names if name in weights), None)
    if name is None:
        raise ModelError(f"the new weights lack {place.names[0]}: give all that the model has")
    found = weights[name].detach()
    if (tuple(found.shape), found.dtype) != (place.shape, place.dtype):
        raise ModelError(
            f"the new weight {name} is {_kind(tuple(found.shape), found.dtype)}, and the model's is "
            f"{_kind(place.shape, place.dtype)}: give those of such a model, in its type"
        )
    for other in place.names:
        if other != name and other in weights and not _is_same(found, weights[other]):
            raise ModelError(f"the new weights {name} and {other} differ, and the model has one for both")
    return found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (one.data_ptr() == other.data_ptr() and one.stride() == other.stride()) or torch.equal(one, other)


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _held(model: nn.Module) -> Iterator[Held]:
    """All weights of a model, what several layers share once. O(layers)."""
    modules: dict[int, nn.Module] = {}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        modules[id(module)] = module
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    packed: dict[int, tuple[PackedLinear, list[int], dict[int, list[str]]]] = {}
    shared: dict[int, tuple[torch.Tensor, list[str]]] = {}
    readers: dict[int, list[PackedEmbedding]] = {}
    for key, module in modules.items():
        if isinstance(module, FusedMember):
            product = module.group.product
            packed.setdefault(id(product), (product, module.group.sizes, {}))[2][module.member] = paths[key]
        elif isinstance(module, PackedLinear):
            packed[key] = module, [module.out_features], {0: paths[key]}
        elif isinstance(module, PackedEmbedding):
            readers.setdefault(id(module.packed), []).append(module)
        elif isinstance(module, FusedNorm):
            yield [_place(paths[key], "weight", module.weight.shape, module.weight.dtype)], module.take
        else:
            for name, tensor in _own(module):
                shared.setdefault(id(tensor), (tensor, []))[1].extend(path + name for path in paths[key])
    for product, sizes, members in packed.values():
        size, _, has_bias, dtype = product.kind
        read_by = readers.get(id(product.packed), [])  # embeddings, of a layer that is not one of several
        also = [path for reader in read_by for path in paths[id(reader)]]
        places = [_place(members[i] + also, "weight", (count, size), dtype) for i, count in enumerate(sizes)]
        if has_bias:
            places += [_place(members[i], "bias", (count,), dtype) for i, count in enumerate(sizes)]
        yield places, partial(_put_packed, product, read_by, len(sizes))
    for tensor, names in shared.values():
        yield [Place(tuple(names), tuple(tensor.shape), tensor.dtype)], tensor.copy_


def _put_packed(linear: PackedLinear, readers: Sequence[PackedEmbedding], count: int, *new: torch.Tensor) -> None:
    # Joined into a new tensor, one weight too: what is in order as it is would not be copied.
    linear.take(torch.cat(new[:count]), torch.cat(new[count:]) if new[count:] else None)
    for reader in readers:
        reader.hold(linear.packed)


def _place(paths: Sequence[str], name: str, shape: Sequence[int], dtype: torch.dtype) -> Place:
    return Place(tuple(path + name for path in paths), tuple(shape), dtype)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a state dict has of a module itself."""
    yield from ((name, tensor) for name, tensor in module._parameters.items() if tensor is not None)
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor
