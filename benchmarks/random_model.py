"""Models of random weights in the real one's proportions, written one weight after the other: never whole in memory."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from trainer_core import model

XL: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "encoder_hidden_size": 2048,
}
"""The shape of ACE-Step 1.5 XL."""


def write_model(folder: Path, config: dict[str, Any]) -> int:
    """A diffusers transformer folder in bf16 as `config` describes it; the bytes of its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"_class_name": "AceStepTransformer1DModel"}))
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in model.build(config).state_dict().items()}
    header: dict[str, Any] = {}
    size = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, size + 2 * prod(shape)]}
        size += 2 * prod(shape)
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)  # weights begin at a multiple of their size
    generator = torch.Generator().manual_seed(0)
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for name, shape in shapes.items():
            weight = torch.ones(shape) if "norm" in name else torch.empty(shape).normal_(std=0.02, generator=generator)
            file.write(weight.bfloat16().view(-1).view(torch.uint8).numpy().tobytes())
    return size
