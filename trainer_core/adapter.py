"""The adapter: PEFT layers injected in place into the transformer, and their tensors under ACE-Step's names."""

from pathlib import Path

from diffusers import AceStepTransformer1DModel
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from torch import Tensor
from torch.nn import Parameter

from trainer_core.config import AdapterConfig
from trainer_core.model import to_original

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""Queries, keys, values and outputs of self- and cross-attention, as diffusers names them."""
PEFT_PREFIX = "base_model.model."


def lora_config(config: AdapterConfig, targets: tuple[str, ...]) -> LoraConfig:
    """PEFT's description of the adapter on modules with these names."""
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(targets),
    )


def inject(transformer: AceStepTransformer1DModel, config: AdapterConfig) -> int:
    """Put a fresh adapter into `transformer`; only its parameters are trainable, and they are fp32.

    Returns how many modules were adapted.
    """
    inject_adapter_in_model(lora_config(config, TARGETS), transformer)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)
    modules = {name.split(".lora_")[0] for name, _ in trainable(transformer)}
    assert modules, "no module of the transformer is called by one of TARGETS"
    return len(modules)


def trainable(transformer: AceStepTransformer1DModel) -> list[tuple[str, Parameter]]:
    """The adapter's parameters by name."""
    return [(name, parameter) for name, parameter in transformer.named_parameters() if parameter.requires_grad]


def tensors(transformer: AceStepTransformer1DModel) -> dict[str, Tensor]:
    """The adapter's tensors on the CPU as ACE-Step and PEFT name them."""
    state = get_peft_model_state_dict(transformer)
    return {PEFT_PREFIX + to_original(name): tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def saved_name(parameter_name: str) -> str:
    """What the parameter that `trainable` calls so is called in the file."""
    return PEFT_PREFIX + to_original(parameter_name).replace(".default.", ".")


def save_config(config: AdapterConfig, folder: Path) -> None:
    """Write `adapter_config.json` with the module names of the original model."""
    targets = tuple(to_original(f".{name}.").strip(".") for name in TARGETS)
    described = lora_config(config, targets)
    described.inference_mode = True
    described.save_pretrained(str(folder))
