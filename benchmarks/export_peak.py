"""Claim: the extra device memory of an export or a load is one staging budget, whatever the state.

python -m benchmarks.export_peak

Measured without a GPU, on 64 ranks of a fake CUDA world (tests/distributed): the optimizer's own Python runs, and
every live byte of device memory is counted. The usual way (state_dict_cpu_offload=False) is measured beside it.
"""

from __future__ import annotations

from torch.distributed.tensor import Shard

from benchmarks.runner import Report
from benchmarks.simulated.export_peak import BOUNDED, Shape, local_elements, peaks
from benchmarks.simulated.fake_cuda import fake_cuda_world

STAGING = 4 << 20
MIB = 1 << 20

# (elements of the largest local parameter, number of parameters): the whole grows 64 times at one largest
# parameter, and the largest parameter 64 times at one size of the whole.
POINTS = [(1 << 20, 1), (1 << 20, 4), (1 << 20, 16), (1 << 20, 64), (1 << 22, 16), (1 << 24, 4), (1 << 26, 1)]


def main() -> None:
    columns = ["local elements", "largest", "path", "extra peak MiB", "usual MiB", "usual bytes an element"]
    report = Report("export_peak", "Extra peak device memory of an export, 64 ranks, BF16 moments", columns)
    report.notes = [
        f"`export_staging_bytes` is {STAGING // MIB} MiB. FP32 masters are there too; the usual export passes them on "
        "by reference. A load (set) writes into state that is there and takes nothing in the usual way.",
        "Fake CUDA world: no GPU was used, and no time is claimed.",
    ]
    curve: dict[int, tuple[float, float]] = {}
    with fake_cuda_world() as mesh:
        for elements, count in POINTS:
            shapes = [Shape((elements // 1024, 1024), mesh, (Shard(0),))] * count
            total = local_elements(shapes)
            on, usual = peaks(shapes, STAGING), peaks(shapes, STAGING, offload=False)
            for path in BOUNDED:
                beside = usual[path].extra
                report.add(total, elements, path, on[path].extra / MIB, beside / MIB, f"{beside / total:.2f}")
            if elements == POINTS[0][0]:
                curve[total] = (on["state_dict"].extra / MIB, usual["state_dict"].extra / MIB)

    def plot(axes) -> None:
        totals = sorted(curve)
        axes.loglog(totals, [curve[n][1] for n in totals], "o-", label="usual: 8 bytes an element")
        axes.loglog(totals, [curve[n][0] for n in totals], "o-", label=f"state_dict_cpu_offload: {STAGING // MIB} MiB")
        axes.set_xlabel("elements of the local parameters")
        axes.set_ylabel("extra peak device memory, MiB")
        axes.grid(alpha=0.3)
        axes.legend()

    print(report.write(plot))


if __name__ == "__main__":
    main()
