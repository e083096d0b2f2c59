"""Machine profiles: speeds and memory from which the plan of a study is computed.

Speeds of GPUs are taken from the makers' data sheets, without sparsity. `service.studies.planning.roofline` states the
share of these speeds that programs reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from service.engine_machines import EngineMachines
from service.studies.planning.roofline import PYTHON_LOOPS

__all__ = ["HOST_USABLE", "KINDS", "PRODUCTS", "MachineProfile"]

GB, GIB, TERA = 10**9, 1 << 30, 1e12
# The share of a host's memory that a study may plan for; the rest is for the system, Ray and caches of files.
HOST_USABLE = 0.95


@dataclass(frozen=True)
class MachineProfile:
    """Speeds and memory of one kind of machine, and the number `nodes` of such machines.

    Attributes:
        name: Name of the profile.
        gpus: Number of GPUs; 0 if engines run on the CPU.
        gpu_bytes: Memory of each GPU.
        gpu_flops: Operations per second of a GPU for matrix products in bfloat16 or float16.
        gpu_flops_float32: Operations per second of a GPU for matrix products in float32.
        gpu_bandwidth: Bytes per second that a GPU reads from and writes to its memory.
        link_bandwidth: Bytes per second from pinned host memory to a GPU.
        mapped_bandwidth: Bytes per second from memory-mapped files to a GPU.
        cores: Cores of the CPU.
        core_flops: Operations per second of one core for matrix products in float32.
        core_loops: Iterations per second of a short loop in Python on one core.
        host_bytes: Host memory.
        core_bandwidth: Bytes per second that one core copies, read and written together.
        host_bandwidth: Bytes per second that all cores copy together, read and written together.
        disk_bandwidth: Bytes per second at which models are read from disk.
        network_bandwidth: Bytes per second at which models are downloaded.
        price: Price of a GPU for an hour, or of a machine without GPUs; None if it is not known.
        nodes: Number of such machines.
        source: Source of the figures.
    """

    name: str
    cores: int
    host_bytes: int
    gpus: int = 0
    gpu_bytes: int = 0
    gpu_flops: float = 0.0
    gpu_flops_float32: float = 0.0
    gpu_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    mapped_bandwidth: float = 0.0
    core_flops: float = 9.4e10
    core_loops: float = PYTHON_LOOPS
    core_bandwidth: float = 21e9
    host_bandwidth: float = 200e9
    disk_bandwidth: float = 2e9
    network_bandwidth: float = 250e6
    price: float | None = None
    nodes: int = 1
    source: str = ""

    @property
    def machines(self) -> tuple[EngineMachines, ...]:
        """The machines of this profile as one group of equal machines, in the form that the checks of a study need.

        Their host memory is the part that a study may plan for, so that gradients are not planned in more.
        """
        memory = self.gpu_bytes if self.gpus else None
        return (EngineMachines(self.gpus, int(HOST_USABLE * self.host_bytes), memory, self.nodes),)

    def host_flops(self, threads: int) -> float:
        return self.core_flops * threads

    def copied_per_s(self, threads: int) -> float:
        return min(self.host_bandwidth, self.core_bandwidth * threads)


# One GPU of each kind, with its share of a machine: 2 TB, 112 cores and 8 GPUs in NVIDIA's DGX H100, H200 and A100
# (half of the memory with 40 GB a GPU); for others 96 GB and 12 cores a GPU. A core has the speeds of the machine to
# which the constants of plans were fitted (docs/how-to/plan.md). The speeds of mapped files and of pinned memory were
# measured on an H100 (docs/measurements.md: 8.4 and 51.8 GB/s); those of PCIe 4 are half.
H100 = MachineProfile(
    name="h100",
    cores=14,
    host_bytes=256 * GB,
    gpus=1,
    gpu_bytes=80 * GB,
    gpu_flops=989.4 * TERA,
    gpu_flops_float32=67 * TERA,
    gpu_bandwidth=3.35e12,
    link_bandwidth=50e9,
    mapped_bandwidth=8.4e9,
    source="NVIDIA H100 data sheet (SXM5, 80 GB)",
)
A100 = MachineProfile(
    name="a100",
    cores=16,
    host_bytes=256 * GB,
    gpus=1,
    gpu_bytes=80 * GB,
    gpu_flops=312 * TERA,
    gpu_flops_float32=19.5 * TERA,
    gpu_bandwidth=2.039e12,
    link_bandwidth=25e9,
    mapped_bandwidth=4.2e9,
    source="NVIDIA A100 data sheet (SXM4, 80 GB)",
)
KINDS: dict[str, MachineProfile] = {
    "h100": H100,
    "h200": replace(
        H100,
        name="h200",
        gpu_bytes=141 * GB,
        gpu_bandwidth=4.8e12,
        source="NVIDIA H200 data sheet (SXM5, 141 GB)",
    ),
    "a100": A100,
    "a100-40gb": replace(
        A100,
        name="a100-40gb",
        host_bytes=128 * GB,
        gpu_bytes=40 * GB,
        gpu_bandwidth=1.555e12,
        source="NVIDIA A100 data sheet (SXM4, 40 GB)",
    ),
    "l40s": MachineProfile(
        name="l40s",
        cores=12,
        host_bytes=96 * GB,
        gpus=1,
        gpu_bytes=48 * GB,
        gpu_flops=362 * TERA,
        gpu_flops_float32=91.6 * TERA,
        gpu_bandwidth=864e9,
        link_bandwidth=25e9,
        mapped_bandwidth=4.2e9,
        source="NVIDIA L40S data sheet",
    ),
    "rtx4090": MachineProfile(
        name="rtx4090",
        cores=12,
        host_bytes=96 * GB,
        gpus=1,
        gpu_bytes=24 * GB,
        gpu_flops=165.2 * TERA,
        gpu_flops_float32=82.6 * TERA,
        gpu_bandwidth=1.008e12,
        link_bandwidth=25e9,
        mapped_bandwidth=4.2e9,
        source="NVIDIA Ada GPU architecture whitepaper (GeForce RTX 4090)",
    ),
    "cpu": MachineProfile(
        name="cpu", cores=1, host_bytes=4 * GIB, source="a core as in docs/how-to/plan.md, and 4 GiB for each"
    ),
}
# The name that the driver gives a GPU of each kind; GPUs of other names, such as H100s for PCIe, have other speeds.
PRODUCTS = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100": "NVIDIA A100-SXM4-80GB",
    "l40s": "NVIDIA L40S",
    "rtx4090": "NVIDIA GeForce RTX 4090",
}
