"""What the K/V of a model depend on, told by a name: weights, config, adapters.

A block may be shared by all whose model is the same, and by nobody else. A daemon is of one model,
which its `--model-revision` names by `weights_revision`. Adapters come and go, so each has blocks
of its own, by the extra key `lora`. `Watch` names those that are active, and notices changes.

Adapters are modules as PEFT makes them: a `base_layer`, or `original_module`, and beside it what
belongs to an adapter, in containers under its name. PEFT itself is not needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixcache.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
)
from prefixcache.types import Lora

WEIGHTS_PREFIX = "weights-"
"""A revision, or the path of a LoRA adapter, that begins so is a digest of weights."""
_SAMPLES_PER_TENSOR = 4096
_BASES = ("base_layer", "original_module")
_CONFIG_OF_NO_CONCERN = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",  # each tensor has its own
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)
"""Names, defaults of callers, and what holds for training. All else of a config, known here or not,
counts: rotary embeddings and their scaling, windows, caps, scales, norms, experts.
"""


def weights_revision(model: PreTrainedModel) -> str:
    """A name for what computes K/V: a digest of the config and of evenly spaced elements of each
    parameter and buffer, without those of adapters.

    Equal for equal models in every process. Weights that differ only between the elements looked
    at have the same. Raises InvalidArgumentError for weights that are not loaded.
    """
    config = model.config.get_text_config().to_dict()
    counted = {key: config[key] for key in config.keys() - _CONFIG_OF_NO_CONCERN}
    head = json.dumps(counted, sort_keys=True, default=str)
    return _digest(head, _tensors(model, _AdapterLayers.of(model)))


class Watch:
    """Tells when a model is not any more what it was when this was made.

    Only a look at pointers and version counters, which every change of weights moves but one
    through `Parameter.data`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers = _AdapterLayers.of(model)
        self._parameters = [tensor for _, tensor in _parameters(model, self._layers)]
        self._stamp = _stamp(self._parameters)
        self._merged = self._layers.merged()
        self._adapters_stamp = self._layers.stamp()
        self._lora = self._layers.lora()

    def look_for_adapters(self) -> None:
        """Notice those that were loaded since; `check` alone notices the known ones' changes."""
        layers = _AdapterLayers.of(self._model)
        if layers != self._layers:
            self._layers = layers
            self._parameters = [tensor for _, tensor in _parameters(self._model, layers)]

    @property
    def lora(self) -> Lora | None:
        """The extra key for the adapters that are active, None if none is: their names, and a
        digest of their weights, so that the same name with other weights is another key.
        """
        if (stamp := self._layers.stamp()) != self._adapters_stamp:
            self._lora, self._adapters_stamp = self._layers.lora(), stamp
        return self._lora

    def check(self, lora: Lora | None) -> None:
        """lora: the extra key of the sequences that are to be computed.

        Raises FailedPreconditionError if weights have changed, or if their adapters are not the
        active ones.
        """
        if _stamp(self._parameters) != self._stamp or self._layers.merged() != self._merged:
            raise FailedPreconditionError(
                "the model's weights have changed, or moved, since its CachedModel was made: its "
                "cached blocks are of the old ones; make another CachedModel"
            )
        if lora == self.lora:
            return
        if lora is None or lora.path.startswith(WEIGHTS_PREFIX):
            raise FailedPreconditionError(
                f"the sequences are of {_said(lora)}, and the model has {_said(self.lora)}: "
                f"allocate them with ExtraKeys(lora=CachedModel.lora), and say so to `forward`"
            )


def _said(lora: Lora | None) -> str:
    return "no adapter" if lora is None else f"the adapter {lora.name} ({lora.path})"


@dataclass(frozen=True, slots=True)
class _AdapterLayers:
    """The modules of a model that adapters have a part in."""

    modules: tuple[torch.nn.Module, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> _AdapterLayers:
        return cls(tuple(module for module in model.modules() if _base_of(module) is not None))

    def names(self) -> list[str]:
        """Of those that are active in any of the layers, in the order that they are applied."""
        names: dict[str, None] = {}
        for module in self.modules:
            if not module.disable_adapters:
                names.update(dict.fromkeys(_names(module)))
        return list(names)

    def merged(self) -> list[str]:
        """Names of those that were added to the weights themselves, which is done by way of
        `Parameter.data`.
        """
        return [name for module in self.modules for name in getattr(module, "merged_adapters", ())]

    def own_tensors(self) -> set[torch.Tensor]:
        """Those of all adapters, active or not."""
        return {tensor for module in self.modules for _, tensor in _own(module)}

    def active_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, module in enumerate(self.modules):
            if not module.disable_adapters:
                active = set(_names(module))
                for name, tensor in _own(module):
                    if active & set(name.split(".")):
                        yield f"{number}.{name}", tensor

    def scalings(self) -> list[tuple[int, str, str]]:
        """What the active ones are multiplied by."""
        return [
            (number, name, repr(factors[name]))
            for number, module in enumerate(self.modules)
            if not module.disable_adapters and (factors := getattr(module, "scaling", None))
            for name in _names(module)
            if name in factors
        ]

    def stamp(self) -> Any:
        """Another one whenever `lora` may be."""
        if not self.modules:
            return None
        tensors = [tensor for _, tensor in self.active_tensors()]
        return self.names(), self.scalings(), _stamp(tensors)

    def lora(self) -> Lora | None:
        names = self.names()
        if not names:
            return None
        head = json.dumps([names, self.scalings()])
        return Lora("+".join(names), _digest(head, self.active_tensors()))


def _base_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """What an adapter is added to, or takes the place of, in this module; None in all others."""
    for name in _BASES:
        if name in module._modules and hasattr(module, "active_adapters"):
            return module._modules[name]
    return None


def _names(module: Any) -> list[str]:
    return list(module.active_adapters)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module that are not its base's."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not name.startswith(_BASES):
            yield name, tensor


def _parameters(
    model: PreTrainedModel, layers: _AdapterLayers
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the model without adapters, under the names that they have there."""
    left_out = layers.own_tensors()
    for name, tensor in model.named_parameters():
        if tensor not in left_out:
            parts = (part for part in name.split(".") if part not in _BASES)
            yield ".".join(parts), tensor


def _tensors(model: PreTrainedModel, layers: _AdapterLayers) -> Iterator[tuple[str, torch.Tensor]]:
    """`_parameters`, and buffers: quantised weights, frequencies of rotary embeddings."""
    yield from _parameters(model, layers)
    left_out = layers.own_tensors()
    for name, tensor in model.named_buffers():
        if tensor not in left_out:
            yield name, tensor


def _stamp(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors
    ]


@torch.inference_mode()
def _digest(head: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256(head.encode())
    for name, tensor in tensors:
        if tensor.is_meta:
            raise InvalidArgumentError("model", f"has weights that are not loaded: {name}")
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES_PER_TENSOR)].cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return WEIGHTS_PREFIX + digest.hexdigest()[:32]
