"""Which device and precision a run gets. Devices that are not here are mocked only where the choice is made."""

from typing import Any

import pytest
import torch

from trainer_core import precision
from trainer_core.config import AdapterConfig, HardwareConfig
from trainer_core.precision import Autocast, HardwareError, choose, choose_checkpointing, is_emulated, make_fabric


def hardware(**fields: Any) -> HardwareConfig:
    return HardwareConfig.model_validate(fields)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices of a machine that has them all; change the list to take some away."""
    present: list[Any] = ["cuda", "mps", "xpu", "cpu"]
    monkeypatch.setattr(precision, "available", lambda: present)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
    return present


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", "bf16-mixed"), ("mps", "bf16-mixed"), ("xpu", "bf16-mixed"), ("cpu", "32-true")],
)
def test_auto_precision_for_each_device(device: str, expected: str, devices: list[Any]) -> None:
    assert choose(hardware(device=device)) == (device, expected)


def test_auto_device_is_the_first_there_is(devices: list[Any]) -> None:
    assert choose(hardware())[0] == "cuda"
    devices.remove("cuda")
    assert choose(hardware())[0] == "mps"
    devices[:] = ["cpu"]
    assert choose(hardware()) == ("cpu", "32-true")


@pytest.mark.parametrize("device", ["mps", "xpu", "cpu"])
def test_fp16_is_refused_except_on_cuda(device: str, devices: list[Any]) -> None:
    with pytest.raises(
        HardwareError, match=f"16-mixed does not work on {device}.*(bf16-mixed or 32-true|32-true or bf16)"
    ):
        choose(hardware(device=device, precision="16-mixed"))
    assert choose(hardware(device="cuda", precision="16-mixed")) == ("cuda", "16-mixed")


def test_an_mps_without_bf16_takes_fp32_and_refuses_bf16_by_name(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3))
    assert choose(hardware(device="mps")) == ("mps", "32-true")
    with pytest.raises(HardwareError, match=r"bf16-mixed does not work on mps before macOS 14\. Choose 32-true, or"):
        choose(hardware(device="mps", precision="bf16-mixed"))
    with pytest.raises(HardwareError, match=r"Base weights in bf16 do not work on mps before macOS 14\. Choose fp32"):
        choose(hardware(device="mps"), "bf16")


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", "bf16-mixed"), ("mps", "bf16-mixed"), ("xpu", "bf16-mixed"), ("cpu", "32-true")],
)
def test_a_base_in_bf16_changes_no_automatic_precision(device: str, expected: str, devices: list[Any]) -> None:
    assert choose(hardware(device=device), "bf16") == (device, expected)
    assert choose(hardware(device=device, precision="32-true"), "bf16") == (device, "32-true")


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_quantised_base_weights_are_refused_except_on_cuda(base_dtype: str, devices: list[Any]) -> None:
    for precision_of_it in ("bf16-mixed", "16-mixed", "32-true"):
        assert choose(hardware(precision=precision_of_it), base_dtype) == ("cuda", precision_of_it)
    devices.remove("cuda")
    with pytest.raises(HardwareError, match=f"Base weights in {base_dtype} need cuda, this run is on mps. Choose bf16"):
        choose(hardware(), base_dtype)


def test_bf16_products_are_known_to_be_slow_where_the_processor_has_no_units_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only PyTorch's answer about the processor is made up."""
    for is_native in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda is_native=is_native: is_native)
        assert is_emulated("cpu", "bf16-mixed") == (not is_native)
        assert not is_emulated("cpu", "32-true")
        assert not is_emulated("cuda", "bf16-mixed")


def test_checkpointing_with_dropout_is_refused_where_the_dropout_would_be_drawn_again() -> None:
    """PyTorch does not keep the mps generator for the second computation; auto is off there."""
    dora = AdapterConfig(type="dora", dropout=0.1)
    for asked in (2, "full"):
        with pytest.raises(HardwareError, match="On mps gradient checkpointing with adapter dropout gives wrong grad"):
            choose_checkpointing(asked, "mps", dora)
    assert choose_checkpointing("auto", "mps", dora) == choose_checkpointing("off", "mps", dora) == "off"
    assert choose_checkpointing("auto", "mps", AdapterConfig(type="lokr", dropout=0.1)) == "auto"
    assert choose_checkpointing(3, "mps", AdapterConfig()) == 3
    assert choose_checkpointing("full", "cuda", dora) == "full"


def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(HardwareError, match=r"no xpu device that PyTorch can use\. It has .*cpu"):
        choose(hardware(device="xpu"))


def test_what_this_machine_has_ends_with_the_cpu() -> None:
    assert precision.available()[-1] == "cpu"


def test_an_xpu_run_is_put_on_the_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Fabric; only the answer that the card is there is made up."""
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    for number_format in ("bf16-mixed", "32-true"):
        fabric = make_fabric("xpu", number_format)
        assert fabric.device == torch.device("xpu", 0)
        assert (fabric.strategy.precision.precision, fabric.accelerator.name()) == (number_format, "xpu")


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu", "cpu"])
def test_autocast_is_the_devices_own_and_inputs_stay_fp32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A2: Fabric would take xpu for cuda, and would round the timesteps."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(precision, "Fabric", lambda **arguments: made.update(arguments))
    make_fabric(device, "bf16-mixed")  # type: ignore[arg-type]
    plugin = made["strategy"].precision if device == "xpu" else made["plugins"][0]
    assert isinstance(plugin, Autocast)
    assert plugin.device == device
    assert plugin.convert_input({"t": torch.ones(1)})["t"].dtype == torch.float32
    accelerator = made["strategy"].accelerator if device == "xpu" else made["accelerator"]
    assert (accelerator if isinstance(accelerator, str) else accelerator.name()) == device


def test_fabric_on_the_cpu_computes_in_the_chosen_precision() -> None:
    for number_format, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        fabric = make_fabric("cpu", number_format)
        with fabric.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
