"""The device and the number format of a run, chosen for the machine, as Fabric takes them.

Fabric has no accelerator for Intel's xpu, and its mixed precision takes every device but cpu and mps for cuda;
so the accelerator and the autocast are named here, for each device.
"""

from typing import Any, Literal

import psutil
import torch
from lightning import Fabric
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from trainer_core import free_memory
from trainer_core.config import QUANTIZED, AdapterConfig, Checkpointing, HardwareConfig

Device = Literal["cuda", "mps", "xpu", "cpu"]
THIS_PROCESS = psutil.Process()
MIXED = ("bf16-mixed", "16-mixed")
WORKING: dict[Device, tuple[str, ...]] = {
    "cuda": ("bf16-mixed", "16-mixed", "32-true"),
    "mps": ("bf16-mixed", "32-true"),
    "xpu": ("bf16-mixed", "32-true"),
    "cpu": ("32-true", "bf16-mixed"),
}
"""The precisions that each kind of device can have."""


class HardwareError(ValueError):
    """This machine has no such device, or the device no such precision."""


class Autocast(MixedPrecision):
    """Mixed precision that leaves the inputs as they are: Fabric's would round the timesteps to 8 bits."""

    def convert_input(self, data: Any) -> Any:
        """`data` as it is."""
        return data


class XPUAccelerator(Accelerator):
    """Intel graphics cards, which Fabric does not know."""

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one."""
        torch.xpu.set_device(device)

    def teardown(self) -> None:
        """Give back cached memory."""
        torch.xpu.empty_cache()

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """`devices` as given."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The first `devices` cards."""
        return [torch.device("xpu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """How many cards there are."""
        return torch.xpu.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether PyTorch can use one."""
        return torch.xpu.is_available()

    @staticmethod
    def name() -> str:
        """The device type."""
        return "xpu"


def available() -> list[Device]:
    """The devices of this machine, best first; the CPU is always the last."""
    found: list[Device] = []
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    if torch.xpu.is_available():
        found.append("xpu")
    return [*found, "cpu"]


def works(device: Device) -> tuple[str, ...]:
    """The precisions that work on this machine's `device`; `auto` takes the first."""
    if device == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):  # bfloat16 came with macOS 14
        return tuple(precision for precision in WORKING[device] if precision != "bf16-mixed")
    return WORKING[device]


def choose(hardware: HardwareConfig, base_dtype: str = "auto") -> tuple[Device, str]:
    """The device and precision to train with. Raises HardwareError naming what works instead."""
    devices = available()
    device = devices[0] if hardware.device == "auto" else hardware.device
    if device not in devices:
        raise HardwareError(f"This machine has no {device} device that PyTorch can use. It has {', '.join(devices)}.")
    if base_dtype in QUANTIZED and device != "cuda":
        raise HardwareError(f"Base weights in {base_dtype} need cuda, this run is on {device}. Choose bf16 for them.")
    if base_dtype == "bf16" and "bf16-mixed" not in works(device):
        raise HardwareError(f"Base weights in bf16 do not work on {device} before macOS 14. Choose fp32 for them.")
    precision: str = works(device)[0] if hardware.precision == "auto" else hardware.precision
    if precision not in works(device):
        why = " before macOS 14" if device == "mps" and precision == "bf16-mixed" else ""
        raise HardwareError(
            f"Precision {precision} does not work on {device}{why}. Choose {' or '.join(works(device))}, or auto."
        )
    return device, precision


def is_emulated(device: Device, precision: str) -> bool:
    """Whether the processor has no units for the products of `precision`, so that they take a hundred times as long."""
    if device != "cpu" or precision != "bf16-mixed":
        return False
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return not (has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What a product of `tensor` is computed in: autocast's, where it is on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def choose_checkpointing(asked: Checkpointing, device: Device, adapter: AdapterConfig) -> Checkpointing:
    """`asked`, or off in place of auto where a block computed again would draw another dropout.

    PyTorch keeps the generators of cuda and xpu for that, not that of mps. LoKr draws its dropout on the CPU.
    Raises HardwareError for other choices there.
    """
    if device == "mps" and adapter.dropout and adapter.type != "lokr":
        if asked in ("off", "auto"):
            return "off"
        raise HardwareError(
            "On mps gradient checkpointing with adapter dropout gives wrong gradients. Set the dropout to 0 or switch "
            "gradient checkpointing off."
        )
    return asked


def make_fabric(device: Device, precision: str) -> Fabric:
    """Fabric on one device; its autocast, where there is one, is that device's own."""
    plugin = Autocast(precision, device=device) if precision in MIXED else Precision()  # type: ignore[arg-type]
    if device == "xpu":  # Fabric would put an accelerator it does not know on the CPU
        strategy = SingleDeviceStrategy(torch.device("xpu", 0), accelerator=XPUAccelerator(), precision=plugin)
        return Fabric(strategy=strategy, devices=1)
    return Fabric(accelerator=device, devices=1, plugins=[plugin])


def memory_bytes(device: torch.device) -> int:
    """Memory in use for training: the device's peak so far, or this process's resident size on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "xpu":
        return torch.xpu.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return int(THIS_PROCESS.memory_info().rss)


def free_bytes(device: torch.device) -> int:
    """Memory that training can still take on the device, what PyTorch holds there without use included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type == "xpu":
        unused = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        try:
            return int(torch.xpu.mem_get_info(device)[0]) + unused
        except RuntimeError:  # some drivers can't tell what others use of the card
            return int(torch.xpu.get_device_properties(device).total_memory) - torch.xpu.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return free_memory.free_bytes()
