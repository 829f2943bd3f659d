"""What other programs make of an adapter's file: the change of each weight, by ACE-Step's module name.

PEFT, diffusers and LyCORIS are the real ones. ComfyUI has no package: its rule is written down here as its
comfy/lora.py and comfy/weight_adapter/ have it (those of 0.16; the branch for ACE-Step 1.5, LoRAAdapter, LoKrAdapter,
weight_decompose).
"""

import json
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import AceStepPipeline, AutoencoderOobleck, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from tests.conftest import FIXTURE
from trainer_core import model
from trainer_core.naming import diffusers_module, original_module

Changes = dict[str, Tensor]


def base_weights() -> Changes:
    """The fixture model's weights as ComfyUI has them, without `diffusion_model.decoder.`."""
    weights = load_file(FIXTURE / "checkpoint" / "model.safetensors")
    return {name.removeprefix("decoder."): t.float() for name, t in weights.items() if name.startswith("decoder.")}


class Original(nn.Module):
    """Linear layers under ACE-Step's names, with the weights of the fixture model."""

    def __init__(self) -> None:
        super().__init__()
        weights = base_weights()
        for name, module in model.load(str(FIXTURE / "checkpoint")).transformer.named_modules():
            if isinstance(module, nn.Linear):
                path = original_module(name).split(".")
                parent: nn.Module = self
                for part in path[:-1]:
                    if not hasattr(parent, part):
                        parent.add_module(part, nn.Module())
                    parent = parent.get_submodule(part)
                layer = nn.Linear(module.in_features, module.out_features, bias=False)
                layer.weight.data = weights[f"{'.'.join(path)}.weight"].clone()
                parent.add_module(path[-1], layer)


def merged(adapted: nn.Module) -> Changes:
    """What PEFT's own merge makes of the adapted layers' weights."""
    changes = {}
    for name, layer in list(adapted.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            base = layer.get_base_layer()
            assert isinstance(base, nn.Linear)
            before = base.weight.detach().clone()
            layer.merge()
            module = original_module(name).removeprefix("base_model.model.")
            changes[module] = base.weight.detach() - before
            layer.unmerge()
    return changes


def peft(archive: Path, folder: Path) -> PeftModel:
    """Modules under ACE-Step's names with the adapter of the zip, loaded by PEFT."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    (unpacked,) = folder.iterdir()
    return PeftModel.from_pretrained(Original(), str(unpacked))


def in_transformer(adapted: PeftModel) -> model.LoadedModel:
    """The fixture model that computes with the layers of `adapted`."""
    loaded = model.load(str(FIXTURE / "checkpoint"))
    tree = adapted.get_base_model()
    for name, layer in tree.named_modules():
        if isinstance(layer, BaseTunerLayer):
            loaded.transformer.set_submodule(diffusers_module(name), layer)
    return loaded


def comfyui(file: Path) -> Changes:
    """ComfyUI's, at strength 1. Every tensor of the file has to be one that it loads."""
    tensors = load_file(file)
    used: set[str] = set()

    def get(name: str) -> Tensor | None:
        used.add(name)
        return tensors[name].float() if name in tensors else None

    changes = {}
    for name, weight in base_weights().items():
        module = name.removesuffix(".weight")
        for x in (f"base_model.model.{module}", f"lycoris_{module.replace('.', '_')}"):
            alpha, dora_scale = get(f"{x}.alpha"), get(f"{x}.dora_scale")
            up, down = get(f"{x}.lora_up.weight"), get(f"{x}.lora_down.weight")
            w1, w2 = get(f"{x}.lokr_w1"), get(f"{x}.lokr_w2")
            w1_a, w1_b = get(f"{x}.lokr_w1_a"), get(f"{x}.lokr_w1_b")
            w2_a, w2_b = get(f"{x}.lokr_w2_a"), get(f"{x}.lokr_w2_b")
            rank = None
            if up is not None and down is not None:
                difference, rank = up @ down, down.shape[0]
            elif w1 is not None or w1_a is not None:
                if w1_a is not None and w1_b is not None:
                    w1, rank = w1_a @ w1_b, w1_b.shape[0]
                if w2_a is not None and w2_b is not None:
                    w2, rank = w2_a @ w2_b, w2_b.shape[0]
                assert w1 is not None
                assert w2 is not None
                difference = torch.kron(w1, w2).reshape(weight.shape)
            else:
                continue
            if alpha is not None and rank is not None:
                difference = difference * (alpha.item() / rank)
            if dora_scale is None:
                changes[module] = difference
            else:
                assert dora_scale.shape == (weight.shape[0], 1)  # else it would take the norms of columns
                norm = weight.norm(dim=1, keepdim=True) + torch.finfo(torch.float32).eps
                changes[module] = (weight + difference) * (dora_scale / norm) - weight
    assert set(tensors) <= used, "ComfyUI would warn: lora key not loaded"
    return changes


def ace_step_lokr(file: Path) -> Iterator[Changes]:
    """LyCORIS' as ACE-Step builds and loads it: in use, and when it is merged."""
    from lycoris import LycorisNetwork, create_lycoris

    with safe_open(file, framework="pt") as opened:
        config: dict[str, Any] = json.loads(opened.metadata()["lokr_config"])
    targets = config.pop("target_modules")
    decoder = Original()
    LycorisNetwork.apply_preset({"unet_target_name": targets, "target_name": targets})
    network = create_lycoris(decoder, 1.0, algo="lokr", **config)
    network.apply_to()
    assert "unexpected keys" not in network.load_weights(str(file))
    names = {f"lycoris_{name.replace('.', '_')}": name for name, _ in decoder.named_modules()}
    used = {names[module.lora_name]: module.get_weight(module.shape).detach() for module in network.loras}
    merged = {
        names[module.lora_name]: module.get_diff_weight(shape=module.shape)[0].detach() for module in network.loras
    }
    for changes in (used, merged):  # it has modules for all linear layers; those that the file lacks do nothing
        yield {name: tensor for name, tensor in changes.items() if tensor.any()}


def tiny_pipeline(folder: Path) -> None:
    """Write an AceStepPipeline with the fixture model's transformer; all its other parts are as small as they go."""
    heads: Any = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, for the autoencoder's weight norms
        autoencoder = AutoencoderOobleck(4, [2], [1], decoder_channels=4, decoder_input_channels=64)
        words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
        AceStepPipeline(
            vae=autoencoder,
            text_encoder=Qwen3Model(
                Qwen3Config(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, **heads)
            ),
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"),  # type: ignore[no-untyped-call]
            transformer=model.load(str(FIXTURE / "checkpoint")).transformer,
            condition_encoder=AceStepConditionEncoder(
                hidden_size=64,
                intermediate_size=16,
                text_hidden_dim=16,
                num_lyric_encoder_hidden_layers=1,
                num_timbre_encoder_hidden_layers=1,
                **heads,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        ).save_pretrained(folder)


def load_pipeline(folder: Path) -> AceStepPipeline:
    """The pipeline in `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return AceStepPipeline.from_pretrained(folder)
