"""Adapters of other programs: recognised, described and loaded at the strength those programs give them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lokr.layer import factorization
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import FIXTURE, fixture_settings
from tests.trainer_core import programs
from tests.trainer_core.conftest import CLOSE, KINDS, Checkpoints, difference
from tests.trainer_core.programs import Changes
from tests.trainer_core.training import of_kind, run_training
from trainer_core import adapter, adapter_files, adapter_parts, exports, model, naming
from trainer_core.adapter_files import AdapterFile
from trainer_core.config import AdapterConfig
from trainer_core.config_checks import ConfigError, validate
from trainer_core.events import Phase
from trainer_core.formats import FORMATS, FormatName, Precision, refusal, tensor_name
from trainer_core.sources import SourceError

Tensors = dict[str, Tensor]
Q = "layers.0.self_attn.q_proj"


def loaded(file: AdapterFile) -> Changes:
    """What a run that starts from `file` begins with."""
    base = model.load(str(FIXTURE / "checkpoint"))
    adapter.inject(base.transformer, AdapterConfig.model_validate(file.settings))
    adapter.load(base.transformer, file)
    return programs.merged(base.transformer)


@pytest.mark.parametrize(
    ("kind", "name", "precision"),
    [(kind, name, "fp32") for kind in KINDS for name in FORMATS if not refusal(name, KINDS[kind]["type"])]
    + [(kind, "comfyui", "bf16") for kind in ("LoRA", "DoRA", "LoKr")],
)
def test_what_is_exported_can_be_started_from(
    kind: str, name: FormatName, precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """There and back through every format: the trained change, and rank, alpha and targets where the file has them."""
    checkpoint, expected, _ = checkpoints[kind]
    file = tmp_path / "a.safetensors"
    exports.export(checkpoint, name, precision, file)
    if name == "peft":
        shutil.unpack_archive(file, tmp_path, "zip")
        file = tmp_path / "a"
    found = adapter_files.read(file)
    assert difference(loaded(found), expected) <= CLOSE[precision]
    original = adapter_files.read(checkpoint).settings
    if name == "comfyui":  # whose alpha is not always PEFT's: it is the rank for LoKr, and holds the root for rsLoRA
        for settings in (found.settings, original):
            settings.pop("rank_stabilized", None)
            if original["type"] == "lokr" or "rank-stabilised" in kind:
                settings.pop("alpha")
    assert found.settings == original


def as_file(tmp_path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> AdapterFile:
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    return adapter_files.read(tmp_path / "a.safetensors")


def lora(rank: int = 4) -> Tensors:
    """A and B of all attention layers, under PEFT's parts and ACE-Step's modules."""
    torch.manual_seed(0)
    weights = programs.base_weights()
    return {
        f"{name.removesuffix('.weight')}.lora_{part}.weight": torch.randn(shape) * 0.2
        for name, weight in weights.items()
        if "_attn." in name and weight.dim() == 2
        for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank)))
    }


def test_ai_toolkits_file_plays_at_strength_1(tmp_path: Path) -> None:
    tensors = lora()
    found = as_file(tmp_path, {f"diffusion_model.decoder.{name}": tensor for name, tensor in tensors.items()})
    assert found.layout == "ai-toolkit"
    expected = {
        "type": "lora",
        "rank": 4,
        "alpha": 4,
        "rank_stabilized": False,
        "targets": tuple(sorted(found.modules)),
    }
    assert found.settings == expected
    assert len(found.modules) == 32
    assert str(found) == (
        "LoRA of rank 4, alpha 4, on 32 modules (self_attention, cross_attention), in the format of ai-toolkit"
    )
    changes = loaded(found)
    assert torch.allclose(changes[Q], tensors[f"{Q}.lora_B.weight"] @ tensors[f"{Q}.lora_A.weight"], atol=1e-6)


def comfyui(alphas: Callable[[int], Tensor | None]) -> Tensors:
    tensors = {}
    for number, (name, tensor) in enumerate(lora().items()):
        module = name.rpartition(".lora_")[0]
        part = name.removeprefix(module)
        spelled = {".lora_A.weight": ".lora_down.weight", ".lora_B.weight": ".lora_up.weight"}[part]
        tensors[f"base_model.model.{module}{spelled}"] = tensor
        if (alpha := alphas(number)) is not None:
            tensors[f"base_model.model.{module}.alpha"] = alpha
    return tensors


@pytest.mark.parametrize(
    ("alphas", "alpha", "rank"),
    [
        (lambda number: torch.tensor(8.0), 8, 4),
        (lambda number: torch.tensor([8], dtype=torch.bfloat16), 8, 4),
        (lambda number: torch.tensor(8, dtype=torch.float16), 8, 4),
        (lambda number: torch.tensor(8), 8, 4),
        (lambda number: None, 4, 4),
        (lambda number: torch.tensor(6.3), 4, 4),
        (lambda number: torch.tensor(0.5), 4, 4),
        (lambda number: torch.tensor(float(number // 2 + 1)), 4, 4),
        (lambda number: torch.tensor(8.0) if number < 20 else None, 4, 4),
    ],
    ids=["fp32", "bf16", "fp16", "whole number", "none", "fraction", "below 1", "of each module", "of some modules"],
)
def test_every_kind_of_alpha_gives_the_strength_that_it_has_in_comfyui(
    alphas: Callable[[int], Tensor | None], alpha: int, rank: int, tmp_path: Path
) -> None:
    found = as_file(tmp_path, comfyui(alphas))
    assert (found.settings["alpha"], found.settings["rank"]) == (alpha, rank)
    assert difference(loaded(found), programs.comfyui(tmp_path / "a.safetensors")) <= 1e-5


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("header", [True, False])
def test_a_lokr_of_lycoris_itself_plays_as_there(
    whole: bool, header: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained by ACE-Step with LyCORIS: its alpha counts, but for two whole matrices; with and without its config."""
    from lycoris import LycorisNetwork, create_lycoris

    monkeypatch.setattr(LycorisNetwork, "TARGET_REPLACE_MODULE", [])
    monkeypatch.setattr(LycorisNetwork, "TARGET_REPLACE_NAME", [".*_attn.*"])
    config = {
        "linear_dim": 64 if whole else 2,
        "linear_alpha": 128 if whole else 8,
        "factor": -1 if whole else 4,
        "decompose_both": False,
    }
    decoder = programs.Original()
    network = create_lycoris(decoder, 1.0, algo="lokr", **config)
    network.apply_to()
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    metadata = {"lokr_config": json.dumps(config)} if header else {}
    network.save_weights(str(tmp_path / "lokr_weights.safetensors"), None, metadata)
    names = {f"lycoris_{name.replace('.', '_')}": name for name, _ in decoder.named_modules()}
    expected = {names[lora.lora_name]: lora.get_weight(lora.shape).detach() for lora in network.loras}
    assert len(expected) == 32
    found = adapter_files.read(tmp_path)
    assert difference(loaded(found), expected) <= 1e-5
    if header:
        assert found.settings["rank"] == config["linear_dim"]
    assert difference(programs.comfyui(tmp_path / "lokr_weights.safetensors"), expected) <= 1e-5


def changed(tmp_path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """ComfyUI's file of a LoRA with its tensors changed."""
    save_file(change(comfyui(lambda number: torch.tensor(8.0))), tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


UP = f"base_model.model.{Q}.lora_up.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {f"unet.{n}": x for n, x in t.items()}, "0 of its 96 tensors ("),
        (lambda t: {}, "0 of its 0 tensors ("),
        (lambda t: t | {"base_model.model.x.weight": torch.ones(1)}, "1 of the 97 tensors in"),
        (lambda t: {n: x for n, x in t.items() if n != UP}, "in 1 of its 32 modules some tensors are missing"),
        (lambda t: t | {UP: torch.ones(64, 5)}, "in 1 of its 32 modules some tensors are missing, of odd shapes"),
        (lambda t: t | {UP: torch.ones(64)}, "in 1 of its 32 modules some tensors are missing, of odd shapes"),
        (
            lambda t: t | {UP: torch.ones(64, 2), UP.replace("up", "down"): torch.ones(2, 64)},
            "has modules of ranks 2, 4; Descant trains one rank for all",
        ),
        (
            lambda t: t | {f"base_model.model.{Q}.lokr_w1": torch.ones(1, 1)},
            "is no whole lokr adapter: in 32 of its 32",
        ),
        (lambda t: t | {f"base_model.model.{Q}.alpha": torch.ones(2)}, "alpha is not one number (F32, [2])"),
        (lambda t: t | {f"base_model.model.{Q}.alpha": torch.tensor(torch.nan)}, "alpha is nan"),
        (lambda t: t | {f"base_model.model.{Q}.lora_B.weight": torch.ones(64, 4)}, f"holds {Q} lora_B.weight twice"),
        (lambda t: t | {"base_model.model.layers.9.x.alpha": torch.ones(1)}, "1 of the 97 tensors in"),
        (lambda t: t | {UP: t[UP].int()}, "holds tensors that are no weights: " + UP + " (I32)"),
        (lambda t: {n: x * (0 if n.endswith("alpha") else 1) for n, x in t.items()}, "has alphas of 0"),
        (lambda t: t | {f"base_model.model.{Q}.dora_scale": torch.ones(1, 64)}, "in 32 of its 32 modules"),
        (lambda t: t | {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(64)}, "1 of the 97 tensors in"),
        (lambda t: {n.replace(".0.", "." + "9" * 5000 + "."): x for n, x in t.items()}, "of the 96 tensors in"),
        (lambda t: t | {UP.replace("layers", "LAYERS é"): torch.ones(1)}, "1 of the 97 tensors in"),
    ],
)
def test_what_is_not_a_whole_adapter_is_refused_with_counts(
    change: Callable[[Tensors], Tensors], words: str, tmp_path: Path
) -> None:
    """E4, D5."""
    with pytest.raises(SourceError) as caught:
        adapter_files.read(changed(tmp_path, change))
    assert words in str(caught.value)


def dora(scales: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    """A change that makes all modules DoRA's, their magnitudes made of the upper matrices."""
    return lambda t: t | {n.replace("lora_up.weight", "dora_scale"): scales(x) for n, x in t.items() if "up" in n}


def test_a_dora_of_comfyui_plays_as_there_and_one_for_each_input_is_refused(tmp_path: Path) -> None:
    """LyCORIS can norm columns, which PEFT can't: on square layers the shapes alone would fit."""
    file = changed(tmp_path, dora(lambda up: torch.rand(len(up), 1) + 0.5))
    assert difference(loaded(adapter_files.read(file)), programs.comfyui(file)) <= 1e-5
    with pytest.raises(SourceError, match="in 32 of its 32 modules some tensors are missing, of odd shapes"):
        adapter_files.read(changed(tmp_path, dora(lambda up: torch.ones(1, len(up)))))


def test_the_same_magnitudes_under_lycoris_names_are_refused(tmp_path: Path) -> None:
    """Its own rule and ComfyUI's differ, and the file does not say which it was made for."""
    flat = {tensor_name("lycoris", *split(name)): tensor for name, tensor in lora().items()}
    found = as_file(tmp_path, flat)
    assert (found.layout, found.kind) == ("lycoris", "lora")
    with pytest.raises(SourceError, match="1 of the 65 tensors in"):
        as_file(tmp_path, flat | {"lycoris_layers_0_self_attn_q_proj.dora_scale": torch.ones(64, 1)})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, 4),
        ({"r": 4, "lora_alpha": 16}, 16),
        ({"r": 4}, 8),
        ({"r": 4, "lora_alpha": 16, "use_rslora": True}, 16),
    ],
)
def test_a_file_of_diffusers_plays_as_the_pipeline_plays_it(
    options: dict[str, Any] | None, expected: int, tmp_path: Path
) -> None:
    """PEFT's own defaults where its options are there but silent; strength 1 where there are none."""
    tensors = {tensor_name("diffusers", *split(name)): tensor for name, tensor in lora().items()}
    described = {f"transformer.{key}": value for key, value in (options or {}).items()}
    if options:
        described["transformer.target_modules"] = sorted(
            {name.split(".", 1)[1].rpartition(".lora_")[0] for name in tensors}
        )
    found = as_file(tmp_path, tensors, {"lora_adapter_metadata": json.dumps(described)} if options else None)
    assert found.settings["alpha"] == expected
    programs.tiny_pipeline(tmp_path / "pipeline")
    pipeline = programs.load_pipeline(tmp_path / "pipeline")
    pipeline.load_lora_weights(str(tmp_path / "a.safetensors"))
    assert difference(loaded(found), programs.merged(pipeline.transformer)) <= 1e-6


def split(name: str) -> tuple[str, str]:
    module, _, part = name.rpartition(".lora_")
    return module, f"lora_{part}"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"transformer.r": 8}, "speaks of another (r 8, use_dora False)"),
        ({"r": 4, "lora_alpha": 4}, "speaks of another (r 8, use_dora False)"),
        ({"transformer.r": 4, "transformer.use_dora": True}, "speaks of another (r 4, use_dora True)"),
        ({"transformer.r": 4, "transformer.bias": "all"}, "with biases, which Descant does not"),
        ({"transformer.r": 4, "transformer.init_lora_weights": "pissa"}, "with init_lora_weights, which Descant"),
        ({"transformer.r": 4, "transformer.rank_pattern": {"to_q": 2}}, "with rank_pattern, which Descant does not"),
        ({"transformer.r": 4, "transformer.lora_alpha": "x"}, "lora_alpha is 'x', not a number"),
    ],
)
def test_what_the_pipeline_would_not_play_so_is_refused(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors = {tensor_name("diffusers", *split(name)): tensor for name, tensor in lora().items()}
    with pytest.raises(SourceError) as caught:
        as_file(tmp_path, tensors, {"lora_adapter_metadata": json.dumps(metadata)})
    assert words in str(caught.value)
    with pytest.raises(SourceError, match="32 of the 96 tensors in"):
        as_file(tmp_path, tensors | {f"{name.rpartition('.lora_')[0]}.alpha": torch.ones(1) for name in tensors})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 8}, "r is 8, the tensors beside it have rank 4"),
        ({"r": 0}, "r is 0, the tensors beside it have rank 4"),
        ({"r": 4.5}, "r is 4.5, the tensors beside it have rank 4"),
        ({"lora_alpha": 1e400}, "lora_alpha is inf, not a number"),
        ({"lora_alpha": 10**400}, "not a number that makes sense"),
        ({"lora_alpha": 0}, "has alphas of 0"),
        ({"lora_alpha": 1e-300}, "has alphas of 0 or next to it"),
        ({"x": " " * (1 << 20)}, "is larger than 1 MiB"),
        ({"use_dora": True}, "describes a dora adapter, the tensors beside it are those of a lora"),
        ({"peft_type": "LOKR"}, "describes a lokr adapter, the tensors beside it are those of a lora"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURE / "adapter", tmp_path / "odd"))
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | change))
    with pytest.raises(SourceError) as caught:
        adapter_files.read(folder)
    assert words in str(caught.value)


def crafted(tmp_path: Path, tensors: dict[str, Any], length: int = 8) -> Path:
    """A file with this header, and `length` bytes behind it."""
    text = json.dumps(tensors).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(length))
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**28, 8], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [1] * 9 + [2], "data_offsets": [0, 8]},
        {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": [1], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        "x",
    ],
)
def test_a_header_that_lies_is_refused(entry: Any, tmp_path: Path) -> None:
    """Before anything is made of its numbers."""
    with pytest.raises(SourceError, match="can't be read as safetensors"):
        adapter_files.read(crafted(tmp_path, {"lycoris_layers_0_self_attn_q_proj.lokr_w2": entry}))


@pytest.mark.parametrize("begin", [0, 4, 12])
def test_tensors_that_overlap_or_leave_gaps_are_refused(begin: int, tmp_path: Path) -> None:
    entries = {
        f"lycoris_layers_0_self_attn_q_proj.lokr_w{number}": {
            "dtype": "F32", "shape": [2, 1], "data_offsets": [offset, offset + 8]
        }
        for number, offset in ((1, 0), (2, begin))
    }  # fmt: skip
    with pytest.raises(SourceError, match="can't be read as safetensors"):
        adapter_files.read(crafted(tmp_path, entries, begin + 8))


@pytest.mark.parametrize("factor", [-1, 2, 3, 4, 5, 8, 100])
def test_sides_are_split_as_peft_splits_them(factor: int) -> None:
    for side in (*range(1, 130), 1024, 2048, 2560, 6144, 9728):
        assert adapter_parts.kronecker_split(side, factor) == factorization(side, factor)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_foreseen_are_those_that_peft_makes(kind: str, checkpoints: Checkpoints) -> None:
    file = adapter_files.read(checkpoints[kind].checkpoint)
    base = model.load(str(FIXTURE / "checkpoint")).transformer
    foreseen = {
        f"{module}.{part}": list(shape)
        for module in file.modules
        for part, shape in adapter_parts.parts_for(
            base.get_submodule(naming.diffusers_module(module)).weight.shape, file.settings
        ).items()
    }
    assert foreseen == file.shapes()


def test_a_lokr_that_peft_can_not_split_so_is_refused_before_the_start(tmp_path: Path) -> None:
    """LyCORIS can have the larger matrix first."""
    name = f"lycoris_{Q.replace('.', '_')}"
    as_file(tmp_path, {f"{name}.lokr_w1": torch.ones(2, 8), f"{name}.lokr_w2": torch.ones(32, 8)})
    found = problems(**fixture_settings(start_from=str(tmp_path / "a.safetensors")) | {"adapter": {}})
    assert "0 of 2 match, 2 of another shape" in found["start_from"]


def test_a_header_without_end_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes((5 << 20).to_bytes(8, "little") + b"{" + b" " * (5 << 20))
    with pytest.raises(SourceError, match="can't be read as safetensors"):
        adapter_files.read(file)


def test_a_file_that_is_cut_off_or_none_is_refused(tmp_path: Path) -> None:
    file = changed(tmp_path, lambda tensors: tensors)
    whole = file.read_bytes()
    endless = (5 << 20).to_bytes(8, "little") + b"{}".ljust(5 << 20)
    for content in (whole[:-1], whole[:100], b"", b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", whole + b"\0", endless):
        file.write_bytes(content)
        with pytest.raises(SourceError, match="can't be read as safetensors"):
            adapter_files.read(file)


def test_pickles_are_refused_unopened(tmp_path: Path) -> None:
    """H1."""
    sentinel = tmp_path / "sentinel"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (sentinel,))

    for name in ("adapter_model.bin", "lora.pt", "lora.ckpt"):
        torch.save({"lora": Trap()}, tmp_path / name)
        with pytest.raises(SourceError, match=r"not a \.safetensors file\. Pickled weights"):
            adapter_files.read(tmp_path / name)
    with pytest.raises(SourceError, match=r"nor any \.safetensors file"):
        adapter_files.read(tmp_path)
    assert not sentinel.exists()


def test_of_several_files_in_a_folder_one_has_to_be_given(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copy(changed(tmp_path, lambda tensors: tensors), tmp_path / f"{name}.safetensors")
    with pytest.raises(
        SourceError, match=r"has 3 .safetensors files \(a.safetensors, one.safetensors, two.safetensors\)"
    ):
        adapter_files.read(tmp_path)


def test_pefts_weights_without_their_config_are_refused(tmp_path: Path) -> None:
    shutil.copy(FIXTURE / "adapter" / "adapter_model.safetensors", tmp_path)
    with pytest.raises(SourceError, match=r"adapter_config\.json is missing, without which the alpha"):
        adapter_files.read(tmp_path / "adapter_model.safetensors")


def problems(**changes: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate(changes)
    return caught.value.fields


def test_what_a_config_leaves_out_is_read_from_the_adapter(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Its kind, rank, alpha and targets; what is given stays, and has to be the same."""
    settings = fixture_settings(start_from=str(checkpoints["LoKr"].checkpoint)) | {"adapter": {"dropout": 0.1}}
    config = validate(settings)
    assert config.adapter == AdapterConfig(
        type="lokr",
        rank=4,
        alpha=10,
        decompose_factor=4,
        dropout=0.1,
        targets=("self_attention", "cross_attention", "mlp", "condition_embedder", "time_embed.linear_1"),
    )
    assert problems(**settings | {"adapter": {"rank": 5}}) == {
        "adapter.rank": "5 was given, the adapter to start from has 4: set 4, or leave it out."
    }


def test_an_adapter_of_another_model_is_refused_with_counts_before_the_start(tmp_path: Path) -> None:
    """The demo's layers are wider; and targets that mean more layers than the adapter has find it in part only."""
    found = problems(model={"source": "demo"}, dataset={"source": "demo"}, start_from=str(FIXTURE / "adapter"))
    assert (
        "0 of 64 match, 64 of another shape (layers.0.cross_attn.k_proj.lora_A.weight is [4, 64], "
        in found["start_from"]
    )
    file = changed(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if "layers.3." not in name})
    asked = {"adapter": {"targets": ["self_attention", "cross_attention"]}}
    found = problems(**fixture_settings(start_from=str(file)) | asked)
    assert "48 of 64 match, 16 missing (layers.3.cross_attn.k_proj.lora_A.weight" in found["start_from"]


@pytest.mark.parametrize("left_out", ["layers.1.", "layers.3."])
def test_modules_of_some_blocks_are_targets_by_their_names(left_out: str, tmp_path: Path) -> None:
    """Those of the first blocks too: only the model tells that it has more."""
    file = changed(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if left_out not in name})
    config = validate(fixture_settings(start_from=str(file)) | {"adapter": {}})
    assert len(config.adapter.targets) == 24
    assert not any(left_out in target for target in config.adapter.targets)
    base = model.load(str(FIXTURE / "checkpoint"))
    assert adapter.inject(base.transformer, config.adapter) == 24
    assert adapter.load(base.transformer, adapter_files.read(file)) == (48, 0)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    found = problems(**fixture_settings(start_from="/no/such", training={"learning_rate": -1}))
    assert set(found) == {"start_from", "training.learning_rate"}
    tensors = {
        name: tensor.repeat(300, 1) if "lora_A" in name else tensor.repeat(1, 300) for name, tensor in lora().items()
    }
    as_file(tmp_path, {f"diffusion_model.decoder.{name}": tensor for name, tensor in tensors.items()})
    found = problems(**fixture_settings(start_from=str(tmp_path / "a.safetensors")) | {"adapter": {}})
    assert (
        "adapter.rank of the adapter. 1200 was given; this takes a whole number from 1 to 1,024" in found["start_from"]
    )


@pytest.mark.parametrize("path", ["demo", "'{}'", '"{}"'])
def test_a_path_may_stand_in_quotes_and_demo_is_none(path: str, tmp_path: Path) -> None:
    if path == "demo":
        assert problems(**fixture_settings(start_from=path))["start_from"].startswith("There is no file or folder /")
    else:
        validate(fixture_settings(start_from=path.format(FIXTURE / "adapter")))


def test_beside_an_adapter_to_start_from_all_else_is_checked_too() -> None:
    start = fixture_settings(start_from=str(FIXTURE / "adapter"))
    assert set(problems(**start | {"adapter": "x"})) == {"adapter"}
    targets = ["self_attention", "cross_attention", "typo"]
    assert "is called typo" in problems(**start | {"adapter": {"targets": targets}})["adapter.targets"]


def test_a_strength_beyond_numbers_is_refused(tmp_path: Path) -> None:
    file = changed(
        tmp_path, lambda t: {n: torch.tensor(1e60, dtype=torch.float64) if "alpha" in n else x for n, x in t.items()}
    )
    with pytest.raises(SourceError, match="is too strong: 32 tensors overflow"):
        loaded(adapter_files.read(file))


@pytest.mark.parametrize("layout", ["peft", "diffusers", "comfyui", "lycoris", "ai-toolkit"])
def test_a_run_starts_from_an_adapter_of_every_format(layout: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """From the settings to the trainer: all tensors matched, and nothing else said of them."""
    file = tmp_path / "a.safetensors"
    kind = "LoKr" if layout == "lycoris" else "LoRA"
    if layout == "peft":
        file = checkpoints[kind].checkpoint
    elif layout == "ai-toolkit":
        save_file({f"diffusion_model.decoder.{name}": tensor for name, tensor in lora().items()}, file)
    else:
        exports.export(checkpoints[kind].checkpoint, "diffusers" if layout == "diffusers" else "comfyui", "fp32", file)
    settings = fixture_settings(
        start_from=str(file), training={"learning_rate": 1e-12, "epochs": 1, "warmup_steps": 0}
    ) | {"adapter": {}}
    config = validate(settings)
    run, events, finished = run_training(tmp_path, **settings | {"adapter": config.adapter.model_dump()})
    assert finished.reason == "completed"
    message = of_kind(events, Phase)[2].message
    count = len(load_file(run.checkpoints / "step-000003" / "adapter_model.safetensors"))
    assert f"Starting from {file}: {count} of {count} tensors matched, 0 of them cast to fp32." in message
    if layout != "ai-toolkit":
        begun, asked = (loaded(adapter_files.read(place)) for place in (run.checkpoints / "step-000003", file))
        assert difference(begun, asked) <= 1e-5
