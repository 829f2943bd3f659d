"""The adapter: PEFT layers injected in place into the transformer, and their tensors under ACE-Step's names."""

from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers import AceStepTransformer1DModel
from peft import LoKrConfig, LoraConfig, PeftConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import Parameter

from trainer_core import tensor_files
from trainer_core.adapter_files import AdapterFile
from trainer_core.adapter_parts import check_kronecker_factor, strength_part
from trainer_core.config import AdapterConfig
from trainer_core.formats import MAGNITUDE, MAGNITUDES, PREFIXES, tensor_name
from trainer_core.merged_lora import MergedLora
from trainer_core.naming import check_targets, is_meant, module_names, original_module, to_original
from trainer_core.sources import SourceError, shorten

PEFT_PREFIX = PREFIXES["peft"]
COMPILED = "_orig_mod."
"""What torch.compile puts into the names of the blocks that it wraps."""
PARAMETER_PREFIXES = ("lora_", "lokr_")


def peft_config(config: AdapterConfig, targets: Iterable[str]) -> PeftConfig:
    """PEFT's description of the adapter on modules whose names end so."""
    if config.type == "lokr":
        return LoKrConfig(
            r=config.rank,
            alpha=config.alpha,
            rank_dropout=config.dropout,
            rank_dropout_scale=True,  # or what is learned would play 1 / (1 - dropout) times as strong
            decompose_both=config.decompose_both,
            decompose_factor=config.decompose_factor,
            target_modules=list(targets),
        )
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.rank_stabilized,
        use_dora=config.type == "dora",
        target_modules=list(targets),
    )


def inject(transformer: AceStepTransformer1DModel, config: AdapterConfig) -> int:
    """Put a fresh adapter into `transformer`; only its parameters are trainable, and they are fp32.

    What an earlier injection left, a failed one too, is taken out before. Returns how many modules were adapted.
    Raises SourceError when a target matches nothing.
    """
    remove(transformer)
    modules = dict(transformer.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    check_targets(config.targets, modules, linear)
    if config.type == "lokr":
        sides = [side for name in linear if is_meant(config.targets, name) for side in modules[name].weight.shape]
        check_kronecker_factor(config.decompose_factor, sides)
    names = dict.fromkeys(name for target in config.targets for name in module_names(target))
    inject_adapter_in_model(peft_config(config, names), transformer)
    for name, parameter in transformer.named_parameters():
        is_adapter = any(prefix in name for prefix in PARAMETER_PREFIXES)
        parameter.requires_grad_(is_adapter)
        if is_adapter:  # PEFT gives them dtype and device of the layer; on the CPU a seed draws the same everywhere
            parameter.data = parameter.data.to("cpu", torch.float32)
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        _initialise(layer)
        MergedLora.take_over(layer)
    return len(layers)


@torch.no_grad()
def _initialise(layer: BaseTunerLayer) -> None:
    """Give a layer's parameters their first values again, now that they are fp32.

    Those that PEFT gave on a base in bf16 were rounded, and a DoRA would not begin as the base model.
    """
    if isinstance(layer, LoKrLayer):
        layer.reset_adapter_parameters("default")
    elif isinstance(layer, LoraLayer):
        layer.reset_lora_parameters("default", init_lora_weights=True)  # type: ignore[no-untyped-call]
        for magnitude in layer.lora_magnitude_vector.parameters():
            base = layer.get_base_layer()
            assert isinstance(base, nn.Linear)
            magnitude.copy_(torch.linalg.norm(base.weight.float(), dim=1))


def remove(transformer: nn.Module) -> None:
    """Take all adapter layers out again; the transformer's own weights are untouched."""
    layers = [(name, module) for name, module in transformer.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, layer in layers:
        parent, _, own = name.rpartition(".")
        setattr(transformer.get_submodule(parent), own, layer.get_base_layer())
    if hasattr(transformer, "peft_config"):
        del transformer.peft_config


def unwrap(module: nn.Module) -> AceStepTransformer1DModel:
    """The bare transformer in any nest of Fabric, torch.compile, DistributedDataParallel and PEFT wrappers."""
    while not isinstance(module, AceStepTransformer1DModel):
        inner = next(
            (
                found
                for name in ("_orig_mod", "module", "base_model", "model")
                if isinstance(found := getattr(module, name, None), nn.Module)
            ),
            None,
        )
        assert inner is not None, f"there is no transformer in a {type(module).__name__}"
        module = inner
    return module


def trainable(transformer: nn.Module) -> list[tuple[str, Parameter]]:
    """The adapter's parameters by name."""
    return [(name, parameter) for name, parameter in transformer.named_parameters() if parameter.requires_grad]


def tensors(transformer: AceStepTransformer1DModel) -> dict[str, Tensor]:
    """The adapter's tensors on the CPU as ACE-Step and PEFT name them."""
    state = get_peft_model_state_dict(transformer)
    return {saved_name(name): tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def saved_name(parameter_name: str) -> str:
    """What the parameter that `trainable` calls so is called in the file."""
    name = PEFT_PREFIX + to_original(parameter_name.replace(COMPILED, ""))
    return name.replace(f".{MAGNITUDE}.default.weight", f".{MAGNITUDE}").replace(".default", "")


@torch.no_grad()
def load(transformer: AceStepTransformer1DModel, file: AdapterFile) -> tuple[int, int]:
    """Set the injected adapter to that in `file`; how many tensors it has, and how many of them were cast to fp32.

    Raises SourceError unless every tensor is matched by name and shape.
    """
    parameters = {saved_name(name): parameter for name, parameter in trainable(transformer)}
    read = tensor_files.load(file.weights)
    found: dict[str, Tensor] = {}
    for name in file.names.keys() & read.keys():
        module, part = file.names[name]
        found[tensor_name("peft", module, part)] = read[name].flatten() if part == MAGNITUDE else read[name]
    tensor_files.check(file.weights, {name: parameter.shape for name, parameter in parameters.items()}, found)
    for name, parameter in parameters.items():
        parameter.copy_(found[name])
    for module, gain in file.gains.items():
        parameters[tensor_name("peft", module, strength_part(file.modules[module]))].mul_(gain)
    if file.kind == "dora" and MAGNITUDES[file.layout] != MAGNITUDE:
        for base, adapted, magnitudes in _dora_norms(transformer).values():
            magnitudes.mul_(adapted / base)
    if bad := [name for name, parameter in parameters.items() if not parameter.isfinite().all()]:
        raise SourceError(f"{file.weights} is too strong: {len(bad)} tensors overflow ({shorten(bad)}).")
    return len(found), sum(tensor.dtype != torch.float32 for tensor in found.values())


@torch.no_grad()
def dora_scales(transformer: AceStepTransformer1DModel) -> dict[str, Tensor]:
    """By module, what a DoRA's magnitudes are in ComfyUI, [out], on the CPU; nothing for other kinds.

    PEFT makes the weights m (W + D) / |W + D| with the norms of rows, ComfyUI d (W + D) / |W| (weight_decompose in its
    comfy/weight_adapter/base.py, where d has one number for each output). So d = m |W| / |W + D|.
    """
    norms = _dora_norms(transformer)
    return {module: (magnitudes * base / adapted).cpu() for module, (base, adapted, magnitudes) in norms.items()}


def _dora_norms(transformer: AceStepTransformer1DModel) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By module of a DoRA: the norms of the rows of its base weights, those with the low-rank change, and its
    magnitudes; [out] each."""
    norms: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, layer in transformer.named_modules():
        if isinstance(layer, LoraLayer) and layer.lora_magnitude_vector:
            base = layer.get_base_layer()
            assert isinstance(base, nn.Linear)
            weight = base.weight.float()
            magnitudes = layer.lora_magnitude_vector["default"].weight
            assert isinstance(magnitudes, Tensor)
            change = layer.get_delta_weight("default")  # type: ignore[attr-defined]
            norms[original_module(name.replace(COMPILED, ""))] = (
                torch.linalg.norm(weight, dim=1),
                torch.linalg.norm(weight + change, dim=1),
                magnitudes,
            )
    return norms


def idle_rank(transformer: nn.Module) -> int:
    """In how many LoKr layers both factors are whole matrices, so that the rank counts only in alpha / rank."""
    layers = [module for module in transformer.modules() if isinstance(module, LoKrLayer)]
    return sum(len(layer.lokr_w1) > 0 and len(layer.lokr_w2) > 0 for layer in layers)


def save_config(config: AdapterConfig, folder: Path) -> None:
    """Write `adapter_config.json` with the module names of the original model."""
    names = dict.fromkeys(name for target in config.targets for name in module_names(target))
    described = peft_config(config, (original_module(name) for name in names))
    described.inference_mode = True
    described.save_pretrained(str(folder))
