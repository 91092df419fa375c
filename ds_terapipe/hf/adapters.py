"""LoRA adapters of peft in a model whose layers a pipeline takes one by one.

peft puts them into the whole model, on the meta device where weights are read layer by layer: its own rules say which modules get
one, and a layer that is taken brings them along. New values are drawn from the seed and the module's name, so they do not depend
on the stages. ``names`` lists what a folder of the adapter consists of, over all stages.
"""

from __future__ import annotations

import copy
import re
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.hf.parts import Parts
from ds_terapipe.hf.weights import folder_of, open_file

CONFIG, VALUES = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of all names in a folder: there peft's model is around the user's
# Fields of LoraConfig that may have any value. Others are variants, which compute or begin in another way.
_FOLLOWED = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias",
    "ensure_weight_tying",
)  # fmt: skip
_NEW = (True, False, "gaussian")  # values of init_lora_weights that need no weight of the base
_KNOWN = (*_NEW, "orthogonal", "eva")  # those that leave the base as it is


class Adapter:
    """The adapter of a model.

    Args:
        config: peft's, which is not changed.
        key: name of what is given, for errors.
        name: of the adapter within the model.
        base: name of the model that it is for; None: as the configuration says.
        file: with its values; None: there is none.
        there: whether the model has it already, with its values.

    Attributes:
        config: peft's, for this model.
        names: of the adapter's tensors in the model, by their names in a folder of peft's.

    Raises:
        ConfigError: another kind than LoRA, or a variant of it.
    """

    def __init__(
        self,
        config: Any,
        key: str,
        *,
        name: str = "default",
        base: str | None = None,
        file: Path | None = None,
        there: bool = False,
    ) -> None:
        self._key, self._name, self._file, self._there = key, name, file, there
        _check_config(config, key, _KNOWN if there or file is not None else _NEW)
        self.config = copy.deepcopy(config)
        self.config.base_model_name_or_path = base or config.base_model_name_or_path
        if not there:
            self.config.inference_mode = False
        self.names: dict[str, str] = {}
        self._values: dict[str, str] = {}  # names in the file, by those in the model
        self._wrapped = re.compile(rf"\.(base_layer|original_module|modules_to_save\.{re.escape(name)})(?=\.)")

    def put_into(self, model: Any, parts: Parts, seed: int, given: bool) -> Parts:
        """Put the adapter into a model, and return the parts of the model with it.

        Logits that are tied to the word embedding are so no longer, since the shared weight is frozen: embedding and head are
        layers of their own. They stay tied where peft trains them so, or the shared weight of a given model trains.
        """
        from peft import get_peft_model_state_dict, inject_adapter_in_model
        from peft.tuners.tuners_utils import cast_adapter_dtype

        if not self._there:
            try:
                with nullcontext() if given else torch.device("meta"):
                    inject_adapter_in_model(self.config, model, self._name)
            except (ValueError, TypeError) as problem:
                raise self._unfit(model, f'"{one_line(problem)}" from peft') from problem
            cast_adapter_dtype(model, self._name)
        self._check_active(model)
        shared_trains = self._there and parts.tied and model.get_submodule(parts.head).weight.requires_grad
        tied = parts.tied and (bool(self.config.ensure_weight_tying) or shared_trains)
        if tied and hasattr(model.get_submodule(parts.head), "lora_A"):
            raise ConfigError(
                f"{self._key}: got an adapter on {parts.head}, which stays tied to {parts.tokens}, must be on other "
                "modules, use target_modules without it, or no ensure_weight_tying"
            )
        known = list(model.state_dict())
        head, tokens = (f"{name}.modules_to_save.{self._name}." for name in (parts.head, parts.tokens))
        saved = get_peft_model_state_dict(
            model, dict(zip(known, known, strict=True)), self._name, save_embedding_layers=False
        )
        self.names = {_PREFIX + own: name.replace(head, tokens) if tied else name for own, name in saved.items()}
        if self._there:  # what else trains of a model that is given; peft loads these names as they are
            trained = [name for name, each in model.named_parameters() if each.requires_grad]
            self.names |= {_PREFIX + name: name for name in trained if name not in set(self.names.values())}
        self._find_values(model)
        if given and not self._there:
            self.begin(model, "", seed)
        return parts._replace(tied=tied)

    def base_name(self, name: str) -> str | None:
        """Return the name that a tensor has in the model without adapters; None: it is an adapter's alone."""
        return None if ".lora_" in name else self._wrapped.sub("", name)

    def begin(self, module: nn.Module, part: str, seed: int) -> None:
        """Set the adapter's values in a module of the model, by its name; the base's are there."""
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper

        how = self.config.init_lora_weights
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for path, inside in module.named_modules():
                if isinstance(inside, LoraLayer):
                    torch.manual_seed(zlib.crc32(f"{seed} {_joined(part, path)} lora".encode()))
                    _draw(inside, self._name, how if how in _NEW else True)
                elif isinstance(inside, ModulesToSaveWrapper):
                    inside.modules_to_save[self._name].load_state_dict(inside.original_module.state_dict())
            if self._file is not None:
                file = open_file(self._file)
                for path, tensor in module.state_dict().items():
                    stored = self._values.get(_joined(part, path))
                    if stored is not None:
                        tensor.copy_(file.get_tensor(stored))

    def write_config(self, folder: Path) -> None:
        """Write peft's configuration, as for a model that is to be used."""
        from peft import TaskType

        config = copy.deepcopy(self.config)
        config.inference_mode, config.task_type = True, config.task_type or TaskType.CAUSAL_LM
        config.save_pretrained(str(folder))

    def _check_active(self, model: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper

        layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
        if any(layer.merged or layer.disable_adapters for layer in layers):
            raise ConfigError(
                f"{self._key}: got an adapter that is merged or disabled, must be beside its layers, use unmerge_adapter() or "
                "enable_adapter_layers()"
            )
        saved = [name for name, each in model.named_modules() if isinstance(each, ModulesToSaveWrapper)]
        for wanted in self.config.modules_to_save or ():
            if not any(name.endswith(wanted) for name in saved):
                raise self._unfit(model, f'modules_to_save "{wanted}"')

    def _find_values(self, model: Any) -> None:
        """Compare the file with the model, and note which of its values belong where.

        Raises:
            ConfigError: it is damaged, or of another model.
        """
        if self._file is None:
            return
        file, known = open_file(self._file), model.state_dict()
        stored = set(file.keys())
        for own in sorted(self.names.keys() - stored):
            raise self._unfit(model, f"{self._file} without {own}")
        for own in sorted(stored):
            # weights of the base may be there, too, which is so for an embedding that has an adapter
            name = self.names.setdefault(own, own.removeprefix(_PREFIX))
            if name not in known:
                raise self._unfit(model, f"{self._file} with {own}")
            shape, wanted = file.get_slice(own).get_shape(), list(known[name].shape)
            if shape != wanted:
                raise self._unfit(model, f"{self._file} with {own} of shape {shape} for one of {wanted}")
            self._values[name] = own

    def _unfit(self, model: Any, got: str) -> ConfigError:
        config = model.config
        what = f"{type(model).__name__} with {config.num_hidden_layers} layers of {config.hidden_size}"
        return ConfigError(f"{self._key}: got {got}, must be of this model ({what}), use one that is for its modules")


def adapter_in(model: Any) -> Adapter | None:
    """Return the adapter of a model, or of peft's around it; None: there is none.

    Raises:
        ConfigError: several.
    """
    configs = getattr(model, "peft_config", None) or {}
    if len(configs) > 1:
        raise ConfigError(
            f"hf.pipeline: got a model with the adapters {', '.join(configs)}, must have one, use model.delete_adapter(...)"
        )
    for name, config in configs.items():
        return Adapter(config, "hf.pipeline", name=name, base=getattr(model, "name_or_path", None), there=True)
    return None


def adapter_of(lora: Any, folder: str | Path | None, base: str | None) -> Adapter | None:
    """Return the adapter that a user wants: new, or from a folder or the Hub.

    Raises:
        ConfigError: both, no LoRA, or a damaged folder; or peft is not installed.
    """
    if lora is None and folder is None:
        return None
    if lora is not None and folder is not None:
        raise ConfigError(
            f"adapter: got {folder} beside lora, must be one of both, use adapter to go on with a saved one"
        )
    try:
        from peft import PeftConfig
    except ImportError as problem:
        raise ConfigError("lora: got no peft, must be installed, use pip install ds_terapipe[hf]") from problem
    if lora is not None:
        return Adapter(lora, "lora", base=base)
    at = folder_of(str(folder), None, "adapter")
    try:
        config = PeftConfig.from_pretrained(str(at))
    except Exception as problem:
        raise ConfigError(
            f"adapter: got {at / CONFIG} ({one_line(problem)}), must be peft's, use a folder that save_pretrained has written"
        ) from problem
    return Adapter(config, "adapter", base=base, file=at / VALUES)


def _check_config(config: Any, key: str, begins: tuple[Any, ...]) -> None:
    kind = getattr(getattr(config, "peft_type", None), "value", type(config).__name__)
    if kind != "LORA":
        raise ConfigError(f"{key}: got {kind}, must be LoRA, use peft.LoraConfig(...)")
    plain = type(config)()
    for field, value in vars(config).items():
        if field not in _FOLLOWED and hasattr(plain, field) and value != getattr(plain, field):
            raise ConfigError(f"{key}: got {field} {value!r}, must be LoRA without variants, use LoraConfig without it")
    if config.init_lora_weights not in begins:
        names = ", ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in begins)
        got = config.init_lora_weights
        raise ConfigError(f'{key}: got init_lora_weights "{got}", must be one of {names}, use True')


def _draw(layer: Any, name: str, how: Any) -> None:
    """Draw the values of a layer's adapter."""
    for of_name in (layer.lora_A, layer.lora_B):
        if name in of_name:
            of_name[name].reset_parameters()
    for values in (layer.lora_embedding_A, layer.lora_embedding_B):
        if name in values:
            nn.init.normal_(values[name])
    layer.reset_lora_parameters(name, how)


def _joined(part: str, path: str) -> str:
    return f"{part}.{path}" if part and path else part or path
