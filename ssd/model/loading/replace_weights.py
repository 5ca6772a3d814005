"""Replaces a loaded model's weights by new weights, also in layers that have been replaced by faster layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd.errors import ModelError
from ssd.model.cpu.cpu_layers import FusedNorm
from ssd.model.cpu.packed_embedding import PackedEmbedding
from ssd.model.cpu.packed_linear import PackedLinear, PackedMember
from ssd.model.loading.threads import one_thread_if_small
from ssd.model.runners.adapted_linear import AdaptedLinear


class StoredWeight(NamedTuple):
    """A weight of a loaded model; it has several ``names`` in the state dict if several layers share it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


# Weights that are stored together, and a function that replaces them, given one tensor for each.
WeightGroup = tuple[Sequence[StoredWeight], Callable[..., object]]


@torch.inference_mode()
def replace_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Replace a loaded model's weights by new weights, also in layers that have been replaced by faster layers.

    ``weights`` contains all weights by their names in transformers' ``state_dict``, with the model's shapes and dtypes,
    on any device. A weight that layers share needs only one of its names. The weights are copied into the existing
    memory, so captured CUDA graphs stay valid. Raises ModelError and changes nothing if a weight is missing, unknown or
    of another shape or dtype, or if LoRA adapters are loaded. O(weights), and memory for a copy of the largest layer.
    """
    if any(isinstance(module, AdaptedLinear) for module in model.modules()):
        raise ModelError(
            "weights cannot be replaced while LoRA adapters are loaded, because the adapters belong to the "
            "current weights: load the model without adapters"
        )
    groups = list(_weight_groups(model))
    selected = [[_select_weight(place, weights) for place in places] for places, _put in groups]
    known = {name for places, _ in groups for place in places for name in place.names}
    if unknown := sorted(weights.keys() - known):
        raise ModelError(
            f"{type(model).__name__} has no weight {unknown[0]}: give the state_dict of this architecture, "
            "without the prefix of a wrapper such as torch.compile"
        )
    with one_thread_if_small(model):  # as when it was loaded, so that layers get the same layout
        for (_places, put), found in zip(groups, selected, strict=True):
            put(*found)


def _select_weight(place: StoredWeight, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name = next((name for name in place.names if name in weights), None)
    if name is None:
        raise ModelError(f"the new weights lack {place.names[0]}: give all weights of the model")
    found = weights[name].detach()
    if (tuple(found.shape), found.dtype) != (place.shape, place.dtype):
        raise ModelError(
            f"the new weight {name} is {_describe(tuple(found.shape), found.dtype)}, but the model's weight is "
            f"{_describe(place.shape, place.dtype)}: give weights of the same shape and dtype"
        )
    for other in place.names:
        if other != name and other in weights and not _is_same(found, weights[other]):
            raise ModelError(
                f"the new weights {name} and {other} differ, but the model shares one weight for both: give equal "
                "weights"
            )
    return found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (one.data_ptr() == other.data_ptr() and one.stride() == other.stride()) or torch.equal(one, other)


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _weight_groups(model: nn.Module) -> Iterator[WeightGroup]:
    """Yield all weights of a model in groups, each with the function that replaces the weights of the group.

    The weights of layers that were joined into one matrix product are one group. A weight that layers share appears
    once.
    """
    modules: dict[int, nn.Module] = {}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        modules[id(module)] = module
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    packed: dict[int, tuple[PackedLinear, list[int], dict[int, list[str]]]] = {}
    shared: dict[int, tuple[torch.Tensor, list[str]]] = {}
    readers: dict[int, list[PackedEmbedding]] = {}
    for key, module in modules.items():
        if isinstance(module, PackedMember):
            product = module.group.product
            packed.setdefault(id(product), (product, module.group.sizes, {}))[2][module.member] = paths[key]
        elif isinstance(module, PackedLinear):
            packed[key] = module, [module.out_features], {0: paths[key]}
        elif isinstance(module, PackedEmbedding):
            readers.setdefault(id(module.packed), []).append(module)
        elif isinstance(module, FusedNorm):
            yield [_stored_weight(paths[key], "weight", module.weight.shape, module.weight.dtype)], module.copy_weight
        else:
            for name, tensor in _state_entries(module):
                shared.setdefault(id(tensor), (tensor, []))[1].extend(path + name for path in paths[key])
    for product, sizes, members in packed.values():
        size, _, has_bias, dtype = product.kind
        # Tied embeddings; only a layer that is not joined with others has them.
        read_by = readers.get(id(product.packed), [])
        also = [path for reader in read_by for path in paths[id(reader)]]
        places = [_stored_weight(members[i] + also, "weight", (count, size), dtype) for i, count in enumerate(sizes)]
        if has_bias:
            places += [_stored_weight(members[i], "bias", (count,), dtype) for i, count in enumerate(sizes)]
        yield places, partial(_put_packed, product, read_by, len(sizes))
    for tensor, names in shared.values():
        yield [StoredWeight(tuple(names), tuple(tensor.shape), tensor.dtype)], tensor.copy_


def _put_packed(linear: PackedLinear, readers: Sequence[PackedEmbedding], count: int, *new: torch.Tensor) -> None:
    # torch.cat always copies, also a single weight; packing alone might not copy a weight that is already in order.
    linear.replace_weight(torch.cat(new[:count]), torch.cat(new[count:]) if new[count:] else None)
    for reader in readers:
        reader.repack(linear.packed)


def _stored_weight(paths: Sequence[str], name: str, shape: Sequence[int], dtype: torch.dtype) -> StoredWeight:
    return StoredWeight(tuple(path + name for path in paths), tuple(shape), dtype)


def _state_entries(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor) for name, tensor in module._parameters.items() if tensor is not None)
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor
