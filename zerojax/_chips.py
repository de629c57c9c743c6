"""Facts about GPUs: what cost models need to know, and what XLA needs to compile for them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU, as its maker describes it.

    Attributes:
      name: the key of the table.
      device_name: what the driver calls it, and jax its `device_kind`.
      memory: bytes that a program can use, as the driver counts them.
      bandwidth: of that memory, bytes per second.
      link: NVLink, bytes per second and GPU in one direction.
      flops: dense bfloat16 operations per second.
      capability: major CUDA compute capability.
      cores: streaming multiprocessors.
      lanes: float32 units of each.
      clock: GHz, boosted.
      cache: bytes of the L2 cache.
      shared: bytes of shared memory of a multiprocessor.
      links: NVLinks of a GPU.
      pcie: bytes per second to the host.
    """

    name: str
    device_name: str
    memory: int
    bandwidth: float
    link: float
    flops: float
    capability: int
    cores: int
    lanes: int
    clock: float
    cache: int
    shared: int
    links: int
    pcie: int

    def target_config(self) -> str:
        """The `GpuTargetConfigProto` in text form from which XLA compiles without the GPU."""
        features = "ACCELERATED_FEATURES" if self.capability >= 9 else "NONE"
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32
              shared_memory_per_block: 49152  shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: 2048  core_count: {self.cores}  fpus_per_core: {self.lanes}
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth:.0f}  l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock}  device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {self.capability} feature_extension: {features} }}
              device_vendor: "NVIDIA Corporation"  device_address_bits: 64
              pcie_bandwidth: {self.pcie}  name: "{self.device_name}"
              driver_version: "13.0.0"  runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0"  dnn_version: "9.12.0"
              device_interconnect_info {{ active_links: {self.links} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
            device_description_str: "{self.device_name}"
        """


# Memory, bandwidth, cores, clock and caches: openxla/xla, xla/backends/gpu/target_config/specs/
# (a100_sxm_80, h100_sxm, h200, b200). FLOP/s without sparsity and NVLink, of which data sheets give
# both directions together: NVIDIA's data sheets for A100 80GB SXM (312 TFLOP/s, 600 GB/s), H100
# SXM and H200 SXM (989, 900) and HGX B200 (2,250, 1,800).
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "a100", "NVIDIA A100-SXM4-80GB", memory=85100068864, bandwidth=2.03904e12, link=300e9,
            flops=312e12, capability=8, cores=108, lanes=64, clock=1.41, cache=41943040,
            shared=167936, links=12, pcie=34359738368,
        ),
        Chip(
            "h100", "NVIDIA H100 80GB HBM3", memory=84942979072, bandwidth=3.35232e12, link=450e9,
            flops=989e12, capability=9, cores=132, lanes=128, clock=1.98, cache=52428800,
            shared=233472, links=18, pcie=34359738368,
        ),
        Chip(
            "h200", "NVIDIA H200 141GB HBM3e", memory=151397597184, bandwidth=4.8e12, link=450e9,
            flops=989e12, capability=9, cores=132, lanes=128, clock=1.98, cache=52428800,
            shared=233472, links=18, pcie=34359738368,
        ),
        Chip(
            "b200", "NVIDIA B200", memory=191514411008, bandwidth=7.67232e12, link=900e9,
            flops=2250e12, capability=10, cores=148, lanes=128, clock=1.965, cache=132644864,
            shared=233472, links=18, pcie=68719476736,
        ),
    )
}  # fmt: skip


def chip_named(name: str) -> Chip:
    """A chip of the table.

    Raises:
      ValueError: it is not in the table.

    >>> chip_named("h100").memory
    84942979072
    """
    if name not in CHIPS:
        raise ValueError(f"unknown chip {name!r}: zerojax knows {', '.join(sorted(CHIPS))}.")
    return CHIPS[name]
