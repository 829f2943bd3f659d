"""ACE-Step 1.5's diffusion transformer, from either layout on disk, with every weight accounted for."""

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
from trainer_core.fingerprint import fingerprint, spread
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
    """A frozen transformer on the CPU, and what its checkpoint says about how it was trained."""

    transformer: AceStepTransformer1DModel
    variant: Variant
    timestep_mu: float
    timestep_sigma: float
    null_condition: Tensor | None
    """The unconditional embedding, [1, 1, D] in fp32; None where the checkpoint has none."""

    def fingerprint(self) -> str:
        """A name for all that decides what an adapter learns from this model: weights, shape, objective."""
        config = [self.transformer.config[key] for key in COMPUTED_WITH]
        described = f"{config} {self.variant} {self.timestep_mu} {self.timestep_sigma}"
        null_condition = torch.empty(0) if self.null_condition is None else self.null_condition
        tensors = [*self.transformer.state_dict().items(), (described, null_condition)]
        return fingerprint((name, spread(tensor)) for name, tensor in tensors)

    @property
    def condition_width(self) -> int:
        """D, the width of the condition embeddings."""
        config = self.transformer.config
        return int(config.encoder_hidden_size or config.hidden_size)


def load(
    source: str,
    variant: Literal["auto", "base", "sft", "turbo"] = "auto",
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto",
) -> LoadedModel:
    """The model that `source` names: `demo`, a folder or a hub id.

    With `base_dtype` bf16 the weights that autocast would round to bf16 anyway are kept so: what is computed under
    bf16-mixed is the same, in half the memory. Norms and tables stay fp32.

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

    in_bf16 = _linear_weights(transformer) if base_dtype == "bf16" else frozenset()
    weights, null_condition = _read(files, in_bf16)
    expected = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    if differences := mismatch(expected, {name: tensor.shape for name, tensor in weights.items()}):
        raise SourceError(
            f"The weights in {files.weights[0].parent} are not those of the model its config.json describes: "
            f"{differences}. Download the model again."
        )
    transformer.load_state_dict(weights, strict=True, assign=True)
    transformer.requires_grad_(False)
    model = LoadedModel(
        transformer,
        _variant(config) if variant == "auto" else variant,
        float(config.get("timestep_mu", -0.4)),
        float(config.get("timestep_sigma", 1.0)),
        null_condition,
    )
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
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise SourceError(f"{path}: {key} is {plain(repr(value), 100)}, should be a number from {low} to {high:g}.")


def build(config: dict[str, Any]) -> AceStepTransformer1DModel:
    """A transformer with fresh weights as a checkpoint's config describes it; other keys of the config are ignored."""
    accepted = inspect.signature(AceStepTransformer1DModel.__init__).parameters
    return AceStepTransformer1DModel(**{key: config[key] for key in accepted if key in config})


def _linear_weights(transformer: AceStepTransformer1DModel) -> frozenset[str]:
    """The names of weights that autocast computes with in low precision: those of linear layers and convolutions."""
    kinds = (nn.Linear, nn.Conv1d, nn.ConvTranspose1d)
    return frozenset(
        f"{name}.{own}"
        for name, module in transformer.named_modules()
        if isinstance(module, kinds)
        for own, _ in module.named_parameters(recurse=False)
    )


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


def _tensors(path: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of a file, in fp32."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if is_wanted(name):
                    tensor = file.get_tensor(name).float()
                    if not tensor.isfinite().all():
                        raise SourceError(f"{name} in {path} holds NaN or infinite values. Download the model again.")
                    yield name, tensor
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path} can't be read as safetensors: {error}. Download the model again.") from error


def _read(files: ModelFiles, in_bf16: frozenset[str]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The transformer's weights under diffusers' names, those named in bf16, and the null condition."""
    weights: dict[str, Tensor] = {}
    null_condition = None
    other_parts = OTHER_PARTS if files.layout == "original" else ()
    for path in files.weights:
        for name, tensor in _tensors(path, lambda name: not name.startswith(other_parts)):
            if name == NULL_CONDITION:
                null_condition = tensor
            else:
                name = to_diffusers(name.removeprefix(DIT_PREFIX)) if name.startswith(DIT_PREFIX) else name
                weights[name] = tensor.bfloat16() if name in in_bf16 else tensor
    for path in files.condition_weights:
        null_condition = dict(_tensors(path, lambda name: name == NULL_CONDITION)).get(NULL_CONDITION, null_condition)
    return weights, null_condition
