import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import base_weights
from benchmarks.random_model import write_model
from tests.conftest import FIXTURE
from trainer_core import model, naming
from trainer_core.config import BaseDtype
from trainer_core.sources import DEMO_MODEL, SourceError

CHECKPOINT = FIXTURE / "checkpoint"


def output(loaded: model.LoadedModel, gradients: bool = False) -> Tensor:
    """The transformer's output for the reference's inputs."""
    reference = load_file(FIXTURE / "reference.safetensors")
    with torch.set_grad_enabled(gradients):
        prediction: Tensor = loaded.transformer(
            hidden_states=reference["hidden_states"],
            timestep=reference["timestep"],
            timestep_r=reference["timestep"],
            encoder_hidden_states=reference["encoder_hidden_states"],
            context_latents=reference["context_latents"],
            return_dict=False,
        )[0]
    return prediction


def expected() -> Tensor:
    return load_file(FIXTURE / "reference.safetensors")["expected_base"]


def checkpoint_with(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    """The fixture checkpoint in `folder` with its tensors changed."""
    shutil.copy(CHECKPOINT / "config.json", folder)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_the_original_layout_reproduces_the_original_code() -> None:
    loaded = model.load(str(CHECKPOINT))
    assert (output(loaded) - expected()).abs().max() <= 1e-6
    assert loaded.variant == "base"
    assert (loaded.timestep_mu, loaded.timestep_sigma) == (-0.4, 1.0)
    assert loaded.null_condition is not None
    assert torch.equal(loaded.null_condition, load_file(CHECKPOINT / "model.safetensors")["null_condition_emb"].float())
    assert not any(parameter.requires_grad for parameter in loaded.transformer.parameters())
    assert {parameter.dtype for parameter in loaded.transformer.parameters()} == {torch.float32}


def test_a_base_in_bf16_weighs_half_and_keeps_norms_and_tables_in_fp32() -> None:
    def weight(loaded: model.LoadedModel) -> int:
        return sum(tensor.nbytes for tensor in loaded.transformer.state_dict().values())

    whole, half = (model.load(str(CHECKPOINT), base_dtype=dtype) for dtype in ("fp32", "bf16"))
    assert weight(half) < 0.56 * weight(whole)  # this small, its convolutions are a tenth of it
    dtypes = {name: tensor.dtype for name, tensor in half.transformer.state_dict().items()}
    assert dtypes["layers.0.self_attn.to_q.weight"] == dtypes["time_embed.linear_1.weight"] == torch.bfloat16
    kept = ("proj_in_conv.weight", "norm_out.weight", "layers.0.scale_shift_table", "time_embed.linear_1.bias")
    assert {dtypes[name] for name in kept} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output(whole), output(half))
    assert half.null_condition is not None
    assert half.null_condition.dtype == torch.float32


def test_how_times_are_drawn_comes_from_the_checkpoints_config(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"timestep_mu": 0.75, "timestep_sigma": 0.5}))
    loaded = model.load(str(folder))
    assert (loaded.timestep_mu, loaded.timestep_sigma) == (0.75, 0.5)
    assert loaded.fingerprint != model.load(str(CHECKPOINT)).fingerprint


def test_a_fingerprint_is_the_same_for_both_layouts_and_base_dtypes(tmp_path: Path) -> None:
    known = model.load(str(CHECKPOINT))
    known.transformer.save_pretrained(tmp_path / "transformer")
    (tmp_path / "condition_encoder").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    assert known.null_condition is not None
    null_condition = {"null_condition_emb": known.null_condition}
    save_file(null_condition, tmp_path / "condition_encoder" / "diffusion_pytorch_model.safetensors")
    assert model.load(str(tmp_path)).fingerprint == known.fingerprint
    assert model.load(str(CHECKPOINT), base_dtype="bf16").fingerprint == known.fingerprint


@pytest.mark.parametrize("base_dtype", ["fp32", "bf16"])
def test_a_fingerprint_is_that_of_checkpoints_made_before(base_dtype: BaseDtype) -> None:
    """Or none of them could be resumed."""
    assert model.load(str(CHECKPOINT), "auto", base_dtype).fingerprint == "f2e6a06f7bef0d66b49420756e7fc2a5"


def test_shards_with_an_index_load_as_one_file_does(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    tensors = sorted(load_file(CHECKPOINT / "model.safetensors").items())
    half = len(tensors) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((tensors[:half], tensors[half:]), start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(dict(part), tmp_path / name)
        weight_map |= {key: name for key, _ in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert (output(model.load(str(tmp_path))) - expected()).abs().max() <= 1e-6


def test_a_diffusers_transformer_and_pipeline_load(tmp_path: Path) -> None:
    original = model.load(str(CHECKPOINT))
    original.transformer.save_pretrained(tmp_path / "transformer")
    alone = model.load(str(tmp_path / "transformer"))
    assert torch.equal(output(alone), output(original))
    assert alone.null_condition is None

    (tmp_path / "condition_encoder").mkdir()
    null_condition = {"null_condition_emb": torch.ones(1, 1, 64)}
    save_file(null_condition, tmp_path / "condition_encoder" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "model_index.json").write_text("{}")
    pipeline = model.load(str(tmp_path))
    assert torch.equal(output(pipeline), output(original))
    assert pipeline.null_condition is not None
    assert pipeline.null_condition.sum() == 64


def test_a_missing_weight_is_counted_and_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["decoder.layers.1.mlp.up_proj.weight"]

    with pytest.raises(SourceError, match=r"\d+ of \d+ match, 1 missing \(layers\.1\.mlp\.up_proj\.weight\)"):
        model.load(checkpoint_with(tmp_path, drop))


def test_an_unexpected_weight_is_counted_and_named(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["decoder.layers.9.surprise"] = torch.ones(1)
        tensors["elsewhere.weight"] = torch.ones(1)

    with pytest.raises(SourceError, match=r"2 unexpected \(.*(surprise|elsewhere)"):
        model.load(checkpoint_with(tmp_path, add))


def test_weights_of_another_size_name_both_shapes(tmp_path: Path) -> None:
    def reshape(tensors: dict[str, Tensor]) -> None:
        tensors["decoder.condition_embedder.weight"] = torch.ones(64, 32)

    with pytest.raises(
        SourceError, match=r"1 of another shape \(condition_embedder.weight is \[64, 32\], should be \[64, 64\]"
    ):
        model.load(checkpoint_with(tmp_path, reshape))


def test_a_missing_null_condition_is_none_and_a_misshapen_one_refused(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["null_condition_emb"]

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors["null_condition_emb"] = torch.ones(1, 1, 32)

    assert model.load(checkpoint_with(tmp_path, drop)).null_condition is None
    with pytest.raises(SourceError, match=r"null_condition_emb is \[1, 1, 32\], should be \[1, 1, 64\]"):
        model.load(checkpoint_with(tmp_path, narrow))


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(SourceError, match="can't be read as safetensors"):
        model.load(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many', should be a whole number from 1 to 512"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"timestep_mu": float("nan")}, "timestep_mu is nan"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"sliding_window": 8.0}, "sliding_window is 8.0, should be a whole number from 1"),
        ({"hidden_size": "wide"}, "does not describe a model that can be built"),
    ],
)
def test_a_config_that_builds_no_model_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SourceError, match=message):
        model.load(str(tmp_path))


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["decoder.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan

    with pytest.raises(SourceError, match=r"decoder\.layers\.1\.mlp\.up_proj\.weight in .* holds NaN"):
        model.load(checkpoint_with(tmp_path, spoil))


@pytest.mark.parametrize(
    ("config", "variant"),
    [
        ({"is_turbo": True, "model_version": "turbo"}, "turbo"),
        ({"is_turbo": False, "model_version": "sft"}, "sft"),
        ({"is_turbo": False, "model_version": "xl-sft"}, "sft"),
        ({"is_turbo": False, "model_version": "base"}, "base"),
        ({"model_version": None}, "base"),
    ],
)
def test_the_variant_is_read_from_the_config(config: dict[str, object], variant: str, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | config))
    assert model.load(str(tmp_path)).variant == variant
    assert model.load(str(tmp_path), "sft").variant == "sft"


def test_renaming_goes_both_ways() -> None:
    tensors = load_file(CHECKPOINT / "model.safetensors")
    names = [name.removeprefix("decoder.") for name in tensors if name.startswith("decoder.")]
    assert names
    for name in names:
        assert naming.to_original(naming.to_diffusers(name)) == name


def test_the_demo_model_is_small_and_real() -> None:
    size = sum(path.stat().st_size for path in DEMO_MODEL.iterdir())
    assert size <= 4_000_000
    loaded = model.load("demo")
    assert type(loaded.transformer).__name__ == "AceStepTransformer1DModel"
    assert 1e6 <= sum(parameter.numel() for parameter in loaded.transformer.parameters()) <= 3e6
    assert loaded.null_condition is not None


def test_a_hub_id_without_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError) as caught:
        model.load("owner/some-model")
    assert "owner/some-model is not on this machine and could not be downloaded" in str(caught.value)
    assert "give the folder of a model you have" in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted as Linux does")
def test_weights_are_held_once_and_not_at_all_where_the_file_has_them_as_wanted(tmp_path: Path) -> None:
    size = write_model(tmp_path / "model", base_weights.SHAPE | {"num_hidden_layers": 2})
    mapped = base_weights.measure(tmp_path / "model", "bf16")
    assert mapped["held"] > 90e6
    assert mapped["most"] < 0.1 * size
    cast = base_weights.measure(tmp_path / "model", "fp32")
    assert cast["held"] == 2 * size
    assert 0.9 * cast["held"] < cast["most"] < 1.15 * cast["held"]
