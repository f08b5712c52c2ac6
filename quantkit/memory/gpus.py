"""GPUs by the names that people give them: memory as torch and as nvidia-smi see it.

``total_gib`` is what torch calls the device's total, as out-of-memory reports print it; the driver's total differs
from it by 0.3 to 1 GiB on NVIDIA. Where cards of one name report several totals, the smallest stands here.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum

from quantkit.errors import UsageError


class Architecture(StrEnum):
    """What engines choose attention backends by: compute capability, or AMD's name."""

    SM80 = "sm80"
    SM89 = "sm89"
    SM90 = "sm90"
    SM100 = "sm100"
    SM103 = "sm103"
    SM120 = "sm120"
    GFX942 = "gfx942"
    GFX950 = "gfx950"

    @property
    def is_amd(self) -> bool:
        return self.value.startswith("gfx")

    @property
    def is_datacenter_blackwell(self) -> bool:
        return self in (Architecture.SM100, Architecture.SM103)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """``driver_mib``: the total of nvidia-smi or rocm-smi, which SGLang's default fraction is computed from.

    ``context_gib``: what is gone before a model loads (CUDA context, NCCL): measured on H200 (2.4) and MI355X (4.5),
    taken over for the others of the same make. ``bandwidth``: bytes a second of its memory, by the data sheet.
    """

    name: str
    title: str
    architecture: Architecture
    total_gib: float
    driver_mib: int
    bandwidth: float

    @property
    def context_gib(self) -> float:
        return 4.5 if self.architecture.is_amd else 2.4

    @property
    def free_before_load_gib(self) -> float:
        """What a rank starts with."""
        return self.total_gib - self.context_gib


def _gpu(
    name: str, title: str, architecture: Architecture, total_gib: float, *, driver_mib: int, terabytes: float
) -> Gpu:
    return Gpu(
        name=name,
        title=title,
        architecture=architecture,
        total_gib=total_gib,
        driver_mib=driver_mib,
        bandwidth=terabytes * 1e12,
    )


# terabytes a second: NVIDIA's data sheets of H100 (SXM), H200, B200 and B300 (HGX, an eighth), GB200 NVL72 (a 72nd of
# 576), RTX PRO 6000 (Blackwell Server), L40S, A100 (SXM, 80 GB); AMD's of Instinct MI300X, MI325X, MI355X. NVIDIA has
# published none of H20: 4.0 is what its sellers state
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", "H100 80GB", Architecture.SM90, 79.1, driver_mib=81_559, terabytes=3.35),
        _gpu("h200", "H200 141GB", Architecture.SM90, 139.8, driver_mib=143_771, terabytes=4.8),
        _gpu("h20", "H20 96GB", Architecture.SM90, 95.0, driver_mib=97_871, terabytes=4.0),
        _gpu("b200", "B200 180GB", Architecture.SM100, 178.35, driver_mib=183_359, terabytes=7.7),
        _gpu("b300", "B300 270GB", Architecture.SM103, 267.69, driver_mib=275_040, terabytes=8.0),
        _gpu("gb200", "GB200 186GB", Architecture.SM100, 184.31, driver_mib=189_471, terabytes=8.0),
        _gpu("mi300x", "MI300X 192GB", Architecture.GFX942, 191.69, driver_mib=196_592, terabytes=5.3),
        _gpu("mi325x", "MI325X 256GB", Architecture.GFX942, 255.69, driver_mib=262_128, terabytes=6.0),
        _gpu("mi355x", "MI355X 288GB", Architecture.GFX950, 287.98, driver_mib=294_896, terabytes=8.0),
        _gpu("rtx-pro-6000", "RTX PRO 6000 96GB", Architecture.SM120, 94.97, driver_mib=97_887, terabytes=1.6),
        _gpu("l40s", "L40S 48GB", Architecture.SM89, 44.39, driver_mib=46_068, terabytes=0.864),
        _gpu("a100", "A100 80GB", Architecture.SM80, 79.14, driver_mib=81_920, terabytes=2.039),
    )
}
DEFAULT_GPU = "h200"
_LEAST_GIB, _MOST_GIB = 8, 10_000


def gpu_named(name: str, *, total_gib: float | None = None) -> Gpu:
    """From the table; ``total_gib`` replaces its memory, the driver's total by as much."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        near = get_close_matches(name.lower(), GPUS, n=3, cutoff=0.4)
        known = f"known: {', '.join(GPUS)}; another one: the nearest of its make, with --gpu-gib"
        raise UsageError(
            f"unknown GPU {name!r}", remedy=f"did you mean {' or '.join(near)}? {known}" if near else known
        )
    if total_gib is None:
        return gpu
    if not _LEAST_GIB <= total_gib <= _MOST_GIB:
        raise UsageError(
            f"--gpu-gib {total_gib:g} is no memory of such a GPU",
            remedy=f"give GiB as torch reports them, from {_LEAST_GIB} to {_MOST_GIB}",
        )
    return replace(
        gpu,
        title=gpu.title.rpartition(" ")[0],
        total_gib=total_gib,
        driver_mib=gpu.driver_mib + round((total_gib - gpu.total_gib) * 1024),
    )
