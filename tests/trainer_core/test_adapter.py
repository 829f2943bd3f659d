"""Every kind of adapter, put through what must hold for each."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.conftest import FIXTURE, fixture_settings
from tests.trainer_core.test_model import output
from tests.trainer_core.training import of_kind, run_training, steps, weights
from trainer_core import adapter, adapter_files, gradient_checkpointing, memory, model, naming, precision
from trainer_core.config import AdapterConfig, Checkpointing
from trainer_core.config_checks import ConfigError, validate
from trainer_core.events import Started, Warning
from trainer_core.sources import SourceError

CHECKPOINT = str(FIXTURE / "checkpoint")
EVERYWHERE = ("self_attention", "cross_attention", "mlp")
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"type": "lora"},
    "rank-stabilised LoRA": {"type": "lora", "rank_stabilized": True},
    "LoRA with dropout": {"type": "lora", "dropout": 0.2},
    "DoRA": {"type": "dora"},
    "LoKr": {"type": "lokr", "decompose_factor": 4},
    "LoKr with dropout": {"type": "lokr", "decompose_factor": 4, "dropout": 0.2},
    "LoKr with both decomposed": {"type": "lokr", "rank": 1, "decompose_factor": 4, "decompose_both": True},
    "LoKr of whole matrices": {"type": "lokr", "rank": 64, "decompose_factor": -1},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_kind_of_weights = pytest.mark.parametrize("kind", [kind for kind in KINDS if "dropout" not in kind])


def config(kind: str, **changes: Any) -> AdapterConfig:
    return AdapterConfig.model_validate({"rank": 4, "alpha": 8} | KINDS[kind] | changes)


def adapted(kind: str, **changes: Any) -> model.LoadedModel:
    loaded = model.load(CHECKPOINT)
    torch.manual_seed(0)
    adapter.inject(loaded.transformer, config(kind, **changes))
    return loaded


def names(transformer: nn.Module) -> list[str]:
    return [name for name, _ in transformer.named_parameters()]


def randomise(transformer: nn.Module) -> None:
    torch.manual_seed(1)
    for _, parameter in adapter.trainable(transformer):
        nn.init.normal_(parameter, std=0.2)


@every_kind_of_weights
def test_a_fresh_adapter_changes_nothing_and_only_it_is_trainable(kind: str) -> None:
    loaded = adapted(kind, targets=EVERYWHERE)
    expected = load_file(FIXTURE / "reference.safetensors")["expected_base"]
    assert (output(loaded) - expected).abs().max() <= 1e-5
    trained = dict(adapter.trainable(loaded.transformer))
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert all("lora_" in name or "lokr_" in name for name in trained)
    assert {adapter.saved_name(name) for name in trained} == set(adapter.tensors(loaded.transformer))


@every_kind_of_weights
def test_on_a_base_in_bf16_a_fresh_adapter_is_not_rounded_and_changes_nothing(kind: str) -> None:
    loaded = {dtype: model.load(CHECKPOINT, base_dtype=dtype) for dtype in ("fp32", "bf16")}
    with torch.autocast("cpu", torch.bfloat16):
        expected = output(loaded["bf16"])
    for each in loaded.values():
        torch.manual_seed(0)
        adapter.inject(each.transformer, config(kind))
    with torch.autocast("cpu", torch.bfloat16):
        assert (output(loaded["bf16"]) - expected).abs().max() <= 2**-7 * expected.abs().max()  # bf16 has 8 bits
    one, two = (dict(adapter.trainable(each.transformer)) for each in loaded.values())
    for name, parameter in one.items():
        if "magnitude" in name:  # the norms of the rounded weights
            assert torch.allclose(parameter, two[name], rtol=2**-8)
            assert not torch.equal(two[name], two[name].bfloat16().float())
        else:
            assert torch.equal(parameter, two[name])


@pytest.mark.parametrize("kind", ["LoRA with dropout", "LoKr with dropout"])
def test_dropout_keeps_the_mean_strength(kind: str) -> None:
    """E2: what is learned under dropout plays as strong without it."""
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    peft.inject_adapter_in_model(adapter.peft_config(config(kind, dropout=0.5), ["0"]), layer)
    for name, parameter in layer.named_parameters():
        torch.manual_seed(0)
        nn.init.normal_(parameter, std=0.3) if "base_layer" not in name else nn.init.zeros_(parameter)
    inputs = torch.randn(1, 64)
    with torch.no_grad():
        still = layer.eval()(inputs)
        layer.train()
        mean = torch.stack([layer(inputs) for _ in range(4000)]).mean(dim=0)
    assert (mean * still).sum() / still.square().sum() == pytest.approx(1, abs=0.05)


@every_kind
def test_a_checkpoint_loads_with_peft_onto_the_original_names(kind: str, tmp_path: Path) -> None:
    """Every kind's saved names, config and values, read by PEFT itself."""
    run, events, finished = run_training(tmp_path, adapter=KINDS[kind], training={"learning_rate": 0.01})
    assert finished.reason == "completed"
    saved = weights(run, "step-000006")
    (started,) = of_kind(events, Started)
    assert (started.adapted_modules, started.trainable_parameters) == (32, sum(t.numel() for t in saved.values()))

    class Original(nn.Module):
        """Modules under ACE-Step's names, as its decoder has them."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict(block(layer)) for layer in source.layers)

    def block(layer: Any) -> dict[str, nn.Module]:
        own = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v"}
        return {
            part: nn.ModuleDict(
                {name: getattr(getattr(layer, part), theirs) for name, theirs in own.items()}
                | {"o_proj": getattr(layer, part).to_out[0]}
            )
            for part in ("self_attn", "cross_attn")
        }

    source = model.load(CHECKPOINT).transformer
    loaded = PeftModel.from_pretrained(Original(), str(run.checkpoints / "step-000006"))
    got = peft.get_peft_model_state_dict(loaded)
    assert set(got) == set(saved)
    assert all(torch.equal(got[name], tensor) for name, tensor in saved.items())


@every_kind
def test_gradients_with_checkpointing_are_those_without(kind: str, tmp_path: Path) -> None:
    """C1. Runs of the same seed, dropout too: weights and losses agree."""
    learned = []
    for choice, described in (("off", "off"), (3, "2 of 4 blocks"), ("full", "full")):
        run, events, _ = run_training(
            tmp_path / str(choice),
            adapter=KINDS[kind],
            training={"gradient_checkpointing": choice, "learning_rate": 0.001, "epochs": 1},
        )
        assert of_kind(events, Started)[0].gradient_checkpointing == described
        learned.append((steps(events), weights(run, "step-000003")))
    (plain_steps, plain_weights), *others = learned
    for its_steps, its_weights in others:
        for one, two in zip(plain_steps, its_steps, strict=True):
            assert one.loss == pytest.approx(two.loss, rel=1e-5)
            assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-5)
        for name, tensor in plain_weights.items():
            assert torch.allclose(tensor, its_weights[name], atol=1e-5)
            assert tensor.abs().max() > 0


def one_step(loaded: model.LoadedModel) -> dict[str, Tensor]:
    """The gradients of one step through Fabric."""
    transformer = loaded.transformer
    fabric = precision.make_fabric("cpu", "32-true")
    parameters = [parameter for _, parameter in adapter.trainable(transformer)]
    module, _ = fabric.setup(transformer, torch.optim.SGD(parameters, lr=0.1))
    module.train()
    inputs = load_file(FIXTURE / "reference.safetensors")
    prediction = module(
        hidden_states=inputs["hidden_states"],
        timestep=inputs["timestep"],
        timestep_r=inputs["timestep"],
        encoder_hidden_states=inputs["encoder_hidden_states"],
        context_latents=inputs["context_latents"],
        return_dict=False,
    )[0]
    torch.manual_seed(3)
    fabric.backward((prediction - torch.randn_like(prediction)).square().mean())
    return {name: p.grad for name, p in adapter.trainable(transformer) if p.grad is not None}


@every_kind_of_weights
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("choice", [2, 3, "full"])
def test_checkpointing_works_enabled_before_or_after_injection(kind: str, before: bool, choice: Checkpointing) -> None:
    """C1, C2: every parameter of the adapter has a gradient, and it is the one without checkpointing, within 1e-5."""
    plain = adapted(kind)
    randomise(plain.transformer)
    expected = one_step(plain)
    loaded = model.load(CHECKPOINT)
    blocks = memory.recomputed(choice, len(loaded.transformer.layers))
    if before:
        gradient_checkpointing.enable(loaded.transformer, blocks)
    adapter.inject(loaded.transformer, config(kind))
    if not before:
        gradient_checkpointing.enable(loaded.transformer, blocks)
    randomise(loaded.transformer)
    gradients = one_step(loaded)
    assert set(gradients) == set(expected) == set(dict(adapter.trainable(loaded.transformer)))
    assert all(torch.allclose(gradients[name], expected[name], atol=1e-5) for name in expected)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


@pytest.mark.parametrize(("choice", "blocks"), [("full", 4), (2, 2), ("off", 0)])
def test_the_chosen_blocks_are_computed_again_also_after_validation_and_a_save(
    choice: Checkpointing, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recomputed: list[int] = []
    honest = torch.utils.checkpoint.checkpoint

    def checkpoint(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        assert options["use_reentrant"] is False
        recomputed[-1] += 1
        return honest(function, *arguments, **options)

    def begin(run: Any, event: Any) -> None:
        if event.type in ("phase", "step"):
            recomputed.append(0)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    options = {"gradient_checkpointing": choice, "gradient_accumulation": 1, "save_every_epochs": 1, "epochs": 2}
    _, events, _ = run_training(tmp_path, begin, dataset={"validation_fraction": 0.2}, training=options)
    assert [count for count in recomputed if count] == ([blocks] * len(steps(events)) if blocks else [])


@every_kind
def test_injecting_again_leaves_the_names_of_a_first_injection(kind: str) -> None:
    first = names(adapted(kind).transformer)
    loaded = adapted("LoRA", targets=("mlp",))
    adapter.inject(loaded.transformer, config(kind))
    assert names(loaded.transformer) == first


def test_injecting_after_a_partial_injection_leaves_the_names_of_a_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = names(adapted("LoRA").transformer)
    loaded = model.load(CHECKPOINT)
    honest, calls = peft.tuners.lora.LoraModel._create_and_replace, 0

    def fail_half_way(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise MemoryError("no room for the eleventh")
        honest(*arguments, **options)

    with monkeypatch.context() as context:
        context.setattr(peft.tuners.lora.LoraModel, "_create_and_replace", fail_half_way)
        with pytest.raises(MemoryError):
            adapter.inject(loaded.transformer, config("LoRA"))
    assert names(loaded.transformer) != names(model.load(CHECKPOINT).transformer)
    adapter.inject(loaded.transformer, config("LoRA"))
    assert names(loaded.transformer) == first
    adapter.remove(loaded.transformer)
    assert names(loaded.transformer) == names(model.load(CHECKPOINT).transformer)


class DistributedDataParallel(nn.Module):
    """How DDP holds a module; the real one needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def fabric_around(module: nn.Module) -> nn.Module:
    wrapped = precision.make_fabric("cpu", "32-true").setup_module(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


@pytest.mark.parametrize(
    "wrappers",
    [
        [],
        [fabric_around],
        [compiled],
        [DistributedDataParallel],
        [compiled, fabric_around],
        [DistributedDataParallel, compiled, fabric_around],
        [fabric_around, compiled],
    ],
)
def test_whatever_wraps_the_transformer_is_taken_off(wrappers: list[Callable[[nn.Module], nn.Module]]) -> None:
    loaded = adapted("DoRA")
    expected = set(adapter.tensors(loaded.transformer))
    module: nn.Module = loaded.transformer
    for wrap in wrappers:
        module = wrap(module)
    assert adapter.unwrap(module) is loaded.transformer
    assert set(adapter.tensors(adapter.unwrap(module))) == expected


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "LoKr"])
def test_blocks_that_are_compiled_one_by_one_keep_their_names(kind: str) -> None:
    """E6."""
    loaded = adapted(kind)
    expected = adapter.tensors(loaded.transformer), adapter.dora_scales(loaded.transformer)
    for index, block in enumerate(loaded.transformer.layers):
        loaded.transformer.layers[index] = compiled(block)
    found = adapter.tensors(loaded.transformer), adapter.dora_scales(loaded.transformer)
    assert [set(tensors) for tensors in found] == [set(tensors) for tensors in expected]
    assert {adapter.saved_name(name) for name, _ in adapter.trainable(loaded.transformer)} == set(expected[0])


def test_pefts_own_wrapper_is_taken_off_too() -> None:
    loaded = model.load(CHECKPOINT)
    wrapped = get_peft_model(loaded.transformer, adapter.peft_config(config("LoRA"), ["to_q"]))
    assert adapter.unwrap(compiled(wrapped)) is loaded.transformer


def modules(targets: tuple[str, ...]) -> list[str]:
    transformer = adapted("LoRA", targets=targets).transformer
    found = {name.partition(".lora_")[0] for name, _ in adapter.trainable(transformer)}
    return sorted(naming.original_module(name) for name in found)


@pytest.mark.parametrize(
    ("targets", "count", "one"),
    [
        (("self_attention",), 16, "layers.3.self_attn.o_proj"),
        (("cross_attention",), 16, "layers.0.cross_attn.v_proj"),
        (("mlp",), 12, "layers.1.mlp.gate_proj"),
        (EVERYWHERE, 44, "layers.2.mlp.down_proj"),
        (("q_proj",), 8, "layers.0.self_attn.q_proj"),
        (("to_out.0",), 8, "layers.0.cross_attn.o_proj"),
        (("layers.0.self_attn.q_proj", "layers.2.mlp.up_proj"), 2, "layers.2.mlp.up_proj"),
        (("mlp", "layers.0.mlp.up_proj"), 12, "layers.0.mlp.up_proj"),
        (("condition_embedder",), 1, "condition_embedder"),
    ],
)
def test_targets_are_groups_or_names_of_either_layout(targets: tuple[str, ...], count: int, one: str) -> None:
    found = modules(targets)
    assert len(found) == count
    assert one in found


@pytest.mark.parametrize("lost", ["no_such", "layers.9.self_attn.q_proj", "proj", "attention", "norm_q", "0"])
def test_a_target_that_matches_nothing_is_an_error_with_what_exists(lost: str) -> None:
    with pytest.raises(SourceError) as caught:
        adapted("LoRA", targets=("mlp", lost))
    assert f"No linear layer of this model is called {lost}." in str(caught.value)
    for there in ("self_attention, cross_attention, mlp", "self_attn.q_proj", "mlp.down_proj", "condition_embedder"):
        assert there in str(caught.value)


def test_a_lokr_rank_without_effect_is_said_before_training(tmp_path: Path) -> None:
    """With factor -1 and a high rank both matrices are whole."""
    options = {"type": "lokr", "rank": 64, "decompose_factor": -1}
    _, events, _ = run_training(tmp_path, adapter=options)
    (warning,) = of_kind(events, Warning)
    assert warning.message.startswith("Rank 64 has no effect on the size of 32 of 32 modules, only on their strength")
    assert [event.type for event in events].index("warning") < [event.type for event in events].index("started")
    _, events, _ = run_training(tmp_path, adapter={"type": "lokr", "rank": 2, "decompose_factor": 4})
    assert of_kind(events, Warning) == []


def test_on_the_real_width_the_idle_rank_is_that_of_the_formats_page() -> None:
    """Rank 64 on 2048 x 2048: factor -1 gives 32 x 32 and 64 x 64, both whole; factor 8 leaves the rank its effect."""
    for factor, idle in ((-1, 1), (8, 0)):
        layer = nn.Sequential(nn.Linear(2048, 2048, bias=False))
        described = adapter.peft_config(config("LoKr", rank=64, decompose_factor=factor), ["0"])
        peft.inject_adapter_in_model(described, layer)
        assert adapter.idle_rank(layer) == idle


@pytest.mark.parametrize("folder", ["adapter", "resume_checkpoint/adapter"])
def test_the_original_adapter_loads_strictly_and_reproduces_the_original_code(folder: str) -> None:
    """ACE-Step's own adapter on our model gives ACE-Step's own output."""
    loaded = adapted("LoRA")
    assert adapter.load(loaded.transformer, adapter_files.read(FIXTURE / folder)) == (64, 0)
    theirs = load_file(FIXTURE / folder / "adapter_model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in adapter.tensors(loaded.transformer).items())
    if folder == "adapter":
        expected = load_file(FIXTURE / "reference.safetensors")["expected_with_adapter"]
        assert (output(loaded) - expected).abs().max() <= 1e-6


def changed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The fixture's adapter in `folder`, with its tensors changed."""
    tensors = change(load_file(FIXTURE / "adapter" / "adapter_model.safetensors"))
    save_file(tensors, folder / "adapter_model.safetensors")
    shutil.copy(FIXTURE / "adapter" / "adapter_config.json", folder)
    return folder


NAME = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {n.replace(NAME, "other"): x for n, x in t.items()}, "1 of the 64 tensors in"),
        (lambda t: {"model." + n: x for n, x in t.items()}, "0 of its 64 tensors ("),
        (lambda t: {n: x for n, x in t.items() if n != NAME}, "in 1 of its 32 modules some tensors are missing"),
        (lambda t: t | {NAME: torch.zeros(8, 64)}, "in 1 of its 32 modules some tensors are missing, of odd shapes"),
        (lambda t: t | {NAME: t[NAME] / 0}, f"holds NaN or infinite values in 1 tensors ({NAME})"),
    ],
)  # fmt: skip
def test_one_wrong_name_shape_or_value_refuses_with_counts(change: Any, words: str, tmp_path: Path) -> None:
    """D5, E4. Nothing is loaded in part."""
    loaded = adapted("LoRA")
    before = adapter.tensors(loaded.transformer)
    with pytest.raises(SourceError) as caught:
        adapter.load(loaded.transformer, adapter_files.read(changed(tmp_path, change)))
    assert words in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.tensors(loaded.transformer).items())


def test_a_wrong_rank_names_both_shapes() -> None:
    with pytest.raises(SourceError, match=r"0 of 64 match, 64 of another shape .* is \[4, 64\], should be \[8, 64\]"):
        adapter.load(adapted("LoRA", rank=8).transformer, adapter_files.read(FIXTURE / "adapter"))


def test_half_precision_is_cast_and_counted(tmp_path: Path) -> None:
    loaded = adapted("LoRA")
    folder = changed(tmp_path, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert adapter.load(loaded.transformer, adapter_files.read(folder)) == (64, 64)
    assert {parameter.dtype for _, parameter in adapter.trainable(loaded.transformer)} == {torch.float32}


@pytest.mark.parametrize("factor", [-1, 4, 5])
def test_a_kronecker_factor_up_to_the_root_of_the_smallest_side_is_taken(factor: int) -> None:
    validate(fixture_settings(adapter={"type": "lokr", "decompose_factor": factor}))
    adapted("LoKr", decompose_factor=factor)


def test_a_kronecker_factor_that_lycoris_would_turn_round_is_refused_at_its_field() -> None:
    words = "A factor of 8 was given and some of the layers to adapt have a side of 32: give at most 5, its root, or -1"
    with pytest.raises(ConfigError) as caught:
        validate(fixture_settings(adapter={"type": "lokr", "decompose_factor": 8}))
    assert caught.value.fields == {"adapter.decompose_factor": f"{words} for the most even split."}
    with pytest.raises(SourceError, match=words):
        adapted("LoKr", decompose_factor=8)
