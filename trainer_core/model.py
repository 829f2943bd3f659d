"""ACE-Step 1.5's diffusion transformer, from either layout on disk, with every weight accounted for and held once.

On the CPU a weight that its file has in the wanted number format is not read: it is a view of the file, mapped into
memory, which the system reads when it is used and may drop again. So the file may be deleted or replaced by another
while a run trains, but not be written over in place: a run then learns from what is written there, and one whose file
is cut short is ended by the system (SIGBUS). Downloaders write a new file and rename it. Any other weight is cast or
moved to the device as it is read, one after the other.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AceStepTransformer1DModel
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer_core import sources
from trainer_core.config import BaseDtype
from trainer_core.fingerprint import fingerprint, spread
from trainer_core.frozen_linear import FrozenLinear, use_frozen_layers
from trainer_core.headers import read_shapes
from trainer_core.matching import mismatch
from trainer_core.naming import DIT_PREFIX, to_diffusers
from trainer_core.sources import DEMO, DEMO_MODEL, ModelFiles, SourceError, plain

Variant = Literal["base", "sft", "turbo"]

NULL_CONDITION = "null_condition_emb"
# What of a config decides the results but is in no weight's shape.
COMPUTED_WITH = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "patch_size",
    "rope_theta",
    "rms_norm_eps",
    "sliding_window",
    "layer_types",
)
OTHER_PARTS = ("encoder.", "tokenizer.", "detokenizer.")
CHECKED_AS_READ = (torch.float32, torch.bfloat16, torch.float16)
"""Number formats in which PyTorch can look for what is not finite; a weight in any other becomes fp32 first."""

# All of a hub repository that training reads, in either layout.
HUB_PATTERNS = [
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model*",
    "model_index.json",
    "transformer/*",
    "condition_encoder/*",
]


@dataclass(frozen=True)
class LoadedModel:
    """A frozen transformer, and what its checkpoint says about how it was trained."""

    transformer: AceStepTransformer1DModel
    variant: Variant
    timestep_mu: float
    timestep_sigma: float
    null_condition: Tensor | None
    """The unconditional embedding, [1, 1, D] in fp32 on the CPU; None where the checkpoint has none."""
    fingerprint: str
    """A name for all that decides what an adapter learns from this model: weights as their files have them, shape,
    objective."""

    @property
    def condition_width(self) -> int:
        """D, the width of the condition embeddings."""
        config = self.transformer.config
        return int(config.encoder_hidden_size or config.hidden_size)


def load(
    source: str,
    variant: Literal["auto", "base", "sft", "turbo"] = "auto",
    base_dtype: BaseDtype = "auto",
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """The model that `source` names (`demo`, a folder or a hub id), on `device`.

    `base_dtype` is how the weights of linear layers are held. In bf16 they are as autocast would round them anyway:
    what is computed under bf16-mixed is the same. In int8 and nf4, which need the package bitsandbytes, those of the
    transformer's blocks are, and the others in bf16. Biases, norms, tables and convolutions are fp32.

    Raises SourceError when a file, a config value or a single weight is missing, unexpected or of another shape.
    """
    files = sources.find_model(_folder(source))
    config = sources.read_json(files.config)
    _check_numbers(config, files.config)
    try:
        with torch.device("meta"):
            transformer = build(config)
    except (TypeError, ValueError, IndexError, ZeroDivisionError, RuntimeError) as error:
        raise SourceError(f"{files.config} does not describe a model that can be built: {error}") from error

    expected = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    found = {own: shape for name, shape in read_shapes(files.weights).items() if (own := _own_name(name, files))}
    if differences := mismatch(expected, {name: tuple(shape) for name, shape in found.items()}):
        raise SourceError(
            f"The weights in {files.weights[0].parent} are not those of the model its config.json describes: "
            f"{differences}. Download the model again."
        )
    use_frozen_layers(transformer, base_dtype)
    samples: dict[str, Tensor] = {}
    for path in files.weights:
        for name, tensor in _tensors(path, lambda name: _own_name(name, files) is not None):
            own = _own_name(name, files)
            assert own
            samples[own] = spread(tensor)
            _place(transformer, own, tensor, torch.device(device))

    if variant == "auto":
        variant = _variant(config)
    mu, sigma = float(config.get("timestep_mu", -0.4)), float(config.get("timestep_sigma", 1.0))
    null_condition = _null_condition(files)
    described = f"{[transformer.config[key] for key in COMPUTED_WITH]} {variant} {mu} {sigma}"
    decisive = [(name, samples[name]) for name in expected]
    decisive += [(described, spread(torch.empty(0) if null_condition is None else null_condition))]
    model = LoadedModel(transformer, variant, mu, sigma, null_condition, fingerprint(decisive))
    if null_condition is not None and null_condition.shape != (1, 1, model.condition_width):
        raise SourceError(
            f"{NULL_CONDITION} is {list(null_condition.shape)}, should be [1, 1, {model.condition_width}]. "
            "Download the model again."
        )
    return model


def _check_numbers(config: dict[str, Any], path: Path) -> None:
    """Refuse what would build layers without end, or be found only in the middle of training."""
    ranges = {
        "num_hidden_layers": (1, 512),
        "sliding_window": (1, 1e6),
        "rope_theta": (1e-6, 1e12),
        "rms_norm_eps": (0, 1),
        "timestep_mu": (-100, 100),
        "timestep_sigma": (0, 100),
    }
    for key, (low, high) in ranges.items():
        value = config.get(key, low)
        kind = int if key in ("num_hidden_layers", "sliding_window") else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            number = "a whole number" if kind is int else "a number"
            raise SourceError(f"{path}: {key} is {plain(repr(value), 100)}, should be {number} from {low} to {high:g}.")


def build(config: dict[str, Any]) -> AceStepTransformer1DModel:
    """A transformer with fresh weights as a checkpoint's config describes it; other keys of the config are ignored."""
    accepted = inspect.signature(AceStepTransformer1DModel.__init__).parameters
    return AceStepTransformer1DModel(**{key: config[key] for key in accepted if key in config})


def _folder(source: str) -> Path:
    if source == DEMO:
        return DEMO_MODEL
    if not sources.is_hub_id(source):
        return Path(source)
    try:
        return Path(snapshot_download(source, allow_patterns=HUB_PATTERNS))
    except RepositoryNotFoundError as error:
        raise SourceError(f"The hub has no model {source} that this machine may read. Check the id.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise SourceError(
            f"{source} is not on this machine and could not be downloaded ({type(error).__name__}). "
            "Check the network, or give the folder of a model you have."
        ) from error


def _variant(config: dict[str, Any]) -> Variant:
    if config.get("is_turbo"):
        return "turbo"
    return "sft" if "sft" in str(config.get("model_version") or "") else "base"


def _own_name(name: str, files: ModelFiles) -> str | None:
    """What diffusers calls a tensor of the files; None for what is not the transformer's."""
    if name == NULL_CONDITION or (files.layout == "original" and name.startswith(OTHER_PARTS)):
        return None
    return to_diffusers(name.removeprefix(DIT_PREFIX)) if name.startswith(DIT_PREFIX) else name


def _tensors(path: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of a file, as views of it where PyTorch can check its number format."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if is_wanted(name):
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in CHECKED_AS_READ:
                        tensor = tensor.float()
                    # A NaN is the least and the greatest of all. `isfinite` would take 20 times as long, and copies.
                    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
                        raise SourceError(f"{name} in {path} holds NaN or infinite values. Download the model again.")
                    yield name, tensor
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path} can't be read as safetensors: {error}. Download the model again.") from error


def _place(transformer: AceStepTransformer1DModel, name: str, tensor: Tensor, device: torch.device) -> None:
    """Give the transformer a weight as its layer holds it, on `device`; without a copy where the file has it so."""
    parent, _, own = name.rpartition(".")
    layer = transformer.get_submodule(parent)
    if isinstance(layer, FrozenLinear) and own == "weight":
        layer.hold(tensor.to(device))
    else:
        setattr(layer, own, nn.Parameter(tensor.to(device, torch.float32), requires_grad=False))


def _null_condition(files: ModelFiles) -> Tensor | None:
    """The unconditional embedding in fp32, a copy; that of a condition encoder's own file where both are there."""
    found = None
    for path in [*files.weights, *files.condition_weights]:
        for _, tensor in _tensors(path, lambda name: name == NULL_CONDITION):
            found = tensor.to(torch.float32, copy=True)
    return found
