"""A libcupti and a libcuda that answer what a test wants, through the vendor's own structures."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


class CuptiStub:
    """Builds the libraries into a folder and says how a process finds them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = folder / "libcupti.so.13"
        self._settings = folder / "cupti.txt"

    def build(self) -> CuptiStub:
        words = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(self.library), str(HERE / "cupti_stub.c")]
        subprocess.run(words, check=True)
        (self.folder / "libcuda.so.1").symlink_to(self.library)
        self.configure()
        return self

    def configure(self, **settings: float | str) -> CuptiStub:
        """Replace all settings; the first two underscores of a key stand for a dot."""
        lines = [f"{key.replace('__', '.', 1)} {value}\n" for key, value in settings.items()]
        self._settings.write_text("".join(lines))
        return self

    def rates(self, **settings: float) -> CuptiStub:
        """Settings with a rate for every metric: see RATES."""
        lines = [f"rate.{name} {value}\n" for name, value in RATES.items()]
        lines += [f"{key.replace('__', '.', 1)} {value}\n" for key, value in settings.items()]
        self._settings.write_text("".join(lines))
        return self

    def env(self) -> dict[str, str]:
        paths = [str(self.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH", "")])]
        return {
            "LD_LIBRARY_PATH": ":".join(paths),
            "CUPTI_STUB": str(self._settings),
            "OPUSMON_CUPTI": str(self.library),
        }


RATES = {
    "dram__bytes_read.sum": 3.0e12,
    "dram__bytes_write.sum": 0.5e12,
    "lts__t_sectors.sum": 2.5e11,
    "lts__t_sectors_srcnode_gpc.sum": 1.25e11,
    "LTS.TriageCompute.lts__average_t_sector_hit_rate_realtime.pct": 15,
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed": 80,
    "sm__warps_active.avg.pct_of_peak_sustained_active": 40,
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 25,
    "pcie__read_bytes.sum": 1e9,
    "pcie__write_bytes.sum": 2e9,
    "nvlrx__bytes_data_user.sum": 3e9,
    "nvltx__bytes_data_user.sum": 4e9,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 5e6,
}
"""4 TB/s asked of the L2 by the SMs (1.25e11 sectors of 32 B), 3 read from HBM: a hit rate of 25 %; of lookups 30 % hit."""
